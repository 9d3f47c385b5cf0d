"""Raw prompts, decoding, end and suppressed ids, and damaged folders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carat_jax.engine.tokenizer import Tokenizer, end_token_ids, suppressed_token_ids
from tests.engine.gemma_like import CONTROL, TEMPLATE, build_backend, write_folder

TOKENIZER = Tokenizer(build_backend())
BOS, EOS = CONTROL.index("<bos>"), CONTROL.index("<eos>")
TURN_END, TOOL_RESPONSE = CONTROL.index("<turn|>"), CONTROL.index("<|tool_response>")


def byte_ids(data: bytes) -> list[int]:
    return [TOKENIZER.token_id(f"<0x{byte:02X}>") for byte in data]


def ids_of(*tokens: str) -> list[int]:
    return [TOKENIZER.token_id(token) for token in tokens]


@pytest.mark.parametrize("adds_bos", [False, True])
class TestOneBos:
    def test_plain_text(self, adds_bos):
        tokenizer = Tokenizer(build_backend(adds_bos))
        assert tokenizer.encode("the cd") == [BOS, *ids_of("the", "▁", "cd")]

    def test_empty_text_is_bos_alone(self, adds_bos):
        assert Tokenizer(build_backend(adds_bos)).encode("") == [BOS]

    @pytest.mark.parametrize("typed", ["<bos>", "<bos><bos>"])
    def test_text_that_spells_bos_first(self, adds_bos, typed):
        tokenizer = Tokenizer(build_backend(adds_bos))
        assert tokenizer.encode(typed + "the") == [BOS, *ids_of("the")]

    def test_chat(self, adds_bos):
        with_bos = Tokenizer(build_backend(adds_bos), chat_templates={"default": TEMPLATE})
        without = Tokenizer(
            build_backend(adds_bos),
            chat_templates={"default": TEMPLATE.replace("{{- bos_token -}}", "")},
        )
        for tokenizer in (with_bos, without):
            ids = tokenizer.encode_chat([{"role": "user", "content": "<bos>the"}])
            assert ids[0] == BOS
            assert ids.count(BOS) == 1


class TestRawText:
    def test_control_tokens_are_parsed(self):
        assert TOKENIZER.encode("<|turn>user\n") == [BOS, *ids_of("<|turn>", "user", "\n")]

    def test_spaces_are_kept(self):
        assert TOKENIZER.encode("  the") == [BOS, *ids_of("▁▁", "the")]
        assert TOKENIZER.encode("   ") == [BOS, *ids_of("▁▁", "▁")]

    def test_byte_names_are_text(self):
        assert TOKENIZER.encode("<0x41>") == [BOS, *ids_of(*"<0x41>")]

    def test_settings_that_cut_or_pad_are_switched_off(self):
        backend = build_backend()
        backend.enable_truncation(3)
        backend.enable_padding(length=32, pad_id=0)
        assert Tokenizer(backend).encode("abxycd") == [BOS, *ids_of(*"abxy", "cd")]

    @pytest.mark.parametrize("prompt", [None, 3, ["a"], b"a"])
    def test_other_types_are_refused(self, prompt):
        with pytest.raises(ValueError, match="prompt: expected text, got"):
            TOKENIZER.encode(prompt)

    def test_half_a_surrogate_pair_is_refused(self):
        with pytest.raises(ValueError, match="character 2 is half of a surrogate pair"):
            TOKENIZER.encode("ab\ud83d")


class TestDecode:
    @given(st.text())
    def test_text_survives_the_round_trip(self, text):
        # Spelled control tokens are parsed in raw text and "▁" is the family's space.
        text = text.replace("<", "").replace("▁", "")
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text

    def test_bytes_make_characters(self):
        assert TOKENIZER.decode(byte_ids("🙂é".encode())) == "🙂é"

    def test_leading_spaces_are_kept(self):
        assert TOKENIZER.decode(ids_of("▁▁", "▁the", "cd")) == "   thecd"

    def test_an_invalid_byte_leaves_its_neighbours_whole(self):
        assert TOKENIZER.decode(byte_ids("本".encode() + b"\xff" + "é".encode())) == "本\ufffdé"

    def test_half_a_character_is_one_mark_a_byte(self):
        assert TOKENIZER.decode([*byte_ids("🙂".encode()[:3]), *ids_of("a")]) == "\ufffd" * 3 + "a"

    def test_control_tokens_are_skipped_or_shown(self):
        ids = ids_of("<|turn>", "a", "<turn|>", "<eos>")
        assert TOKENIZER.decode(ids) == "a"
        assert TOKENIZER.decode(ids, skip_special=False) == "<|turn>a<turn|><eos>"

    def test_ids_beyond_the_vocabulary_are_no_text(self):
        assert TOKENIZER.decode([TOKENIZER.vocab_size, *ids_of("a"), 10**6]) == "a"

    @given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
    def test_equals_the_library_where_byte_runs_are_wholly_valid_or_not(self, ids):
        # given runs of bytes cut into single ASCII bytes, which cannot mix with their neighbours
        first, last = byte_ids(b"\x00\xff")
        ids = [first + (i - first) % 128 if first <= i <= last else i for i in ids]
        assert TOKENIZER.decode(ids) == build_backend().decode(ids, skip_special_tokens=True)

    def test_another_kind_of_decoder_is_refused(self):
        from tokenizers import decoders

        backend = build_backend()
        backend.decoder = decoders.Metaspace()
        with pytest.raises(ValueError, match=r"decoder: got .*Metaspace.*, expected Gemma's"):
            Tokenizer(backend)


class TestEndTokens:
    @pytest.mark.parametrize(
        ("generation_config", "config", "expected"),
        [
            ({"eos_token_id": 7}, {}, {7, EOS}),
            ({"eos_token_id": [7, 9]}, {"eos_token_id": 11}, {7, 9, 11, EOS}),
            ({"temperature": 0.5}, {"text_config": {"eos_token_id": [8]}}, {8, EOS}),
            ({"eos_token_id": None}, {"eos_token_id": None, "text_config": None}, {EOS}),
            (None, None, {EOS}),
        ],
    )
    def test_files_are_joined(self, tmp_path, generation_config, config, expected):
        for template, turn_ends in ((None, set()), (TEMPLATE, {TURN_END, TOOL_RESPONSE})):
            folder = write_folder(
                tmp_path / str(template is None),
                template=template,
                generation_config=generation_config,
                config=config,
            )
            found = Tokenizer.from_folder(folder).eos_ids
            assert found == tuple(sorted(expected | turn_ends))

    @pytest.mark.parametrize("value", ["106", [1, "106"], True, -1, 1.0, {"id": 1}])
    def test_what_is_not_an_id_is_refused(self, value):
        with pytest.raises(ValueError, match=r"config\.json: eos_token_id: expected an id"):
            end_token_ids({}, {"eos_token_id": value})

    def test_suppressed_ids(self, tmp_path):
        assert suppressed_token_ids({"suppress_tokens": [300, 301]}, {}) == (300, 301)
        assert suppressed_token_ids({}, {"image_token_id": 17, "eoa_token_index": 9}) == (9, 17)
        assert suppressed_token_ids({"suppress_tokens": None}, {"boi_token_id": None}) == ()
        # ids of a larger vocabulary cannot be sampled anyway
        folder = write_folder(
            tmp_path, generation_config={"suppress_tokens": [5, 258_883]}, config={}
        )
        assert Tokenizer.from_folder(folder).suppress_ids == (5,)


class TestFolder:
    def test_token_forms(self, tmp_path):
        settings = {"bos_token": {"content": "<|think|>", "special": True}, "eos_token": "<pad>"}
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path, template=None, settings=settings))
        assert tokenizer.bos_id == CONTROL.index("<|think|>")
        assert tokenizer.eos_ids == (CONTROL.index("<pad>"),)
        assert tokenizer.vocab_size == TOKENIZER.vocab_size == build_backend().get_vocab_size()

    def test_missing(self, tmp_path):
        with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
            Tokenizer.from_folder(tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("tokenizer.json", '{"model": ', r"tokenizer\.json: not a readable"),
            ("tokenizer_config.json", "{", r"tokenizer_config\.json: not valid JSON"),
            ("generation_config.json", "[1]", r"generation_config\.json: expected a JSON object"),
            ("config.json", "\xff", r"config\.json: not valid JSON"),
            ("tokenizer_config.json", '{"bos_token": "<s>"}', "bos_token: '<s>' is not in the voc"),
            ("tokenizer_config.json", '{"bos_token": 2}', "bos_token: expected a text, got 2"),
            ("chat_template.jinja", "a\n{% if %}", r"chat_template 'default': line 2"),
        ],
    )
    def test_damaged(self, tmp_path, file, content, message):
        folder = write_folder(tmp_path)
        (folder / file).write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=message) as caught:
            Tokenizer.from_folder(folder)
        assert str(caught.value).startswith(str(folder))
        assert "\n" not in str(caught.value)


@pytest.mark.parity
@pytest.mark.parametrize("adds_bos", [False, True])
def test_raw_text_equals_transformers(tmp_path, adds_bos):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(write_folder(tmp_path, adds_bos=adds_bos) / "tokenizer.json"),
        bos_token="<bos>",
    )
    ours = Tokenizer.from_folder(tmp_path)
    for text in ("the  cat", " a\n\n日本 é🙂", "<|turn>user\nhi<turn|>", "<0x41> <|turn", "\n"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == (ids if adds_bos else [BOS, *ids])
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
