"""Streamed text: whole characters, stop strings over any border, thoughts apart from answers."""

import time
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carat_jax.engine.text_stream import Split, TextStream, ThoughtSplitter
from carat_jax.engine.tokenizer import Tokenizer
from tests.engine.gemma_like import CONTROL, build_backend

TOKENIZER = Tokenizer(build_backend())
any_id = st.integers(0, TOKENIZER.vocab_size - 1)
utf8_ids = st.text().map(lambda t: byte_ids(t.encode()))
id_lists = st.lists(st.lists(any_id, max_size=3) | utf8_ids, max_size=8).map(lambda x: [*chain(*x)])


def byte_ids(data: bytes) -> list[int]:
    return [TOKENIZER.token_id(f"<0x{byte:02X}>") for byte in data]


def ids_of(*tokens: str) -> list[int]:
    return [TOKENIZER.token_id(token) for token in tokens]


def spell(text: str) -> list[int]:
    """One id a character."""
    return [i for char in text for i in TOKENIZER.encode(char)[1:]]


def deltas(stream, chunks):
    return [*(stream.push(chunk) for chunk in chunks), stream.finish()]


def chunked(ids, sizes):
    chunks, start = [], 0
    for size in [*sizes, len(ids)]:
        chunks.append(ids[start : start + size])
        start += size
    return chunks


def text_at_first_stop(text, stop, include_stop):
    """Grow the text by characters until it ends in a stop string; that is the definition."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end if include_stop else end - max(map(len, found))]
    return text


class TestCharacters:
    def test_no_piece_cuts_a_character(self):
        ids = byte_ids("🙂".encode()) + spell("ab") + byte_ids("漢字".encode()) + byte_ids(b"\xff")
        ids += spell("\ufffd") + ids_of("▁the") + byte_ids("\ufffd".encode())
        parts = deltas(TextStream(TOKENIZER), [[i] for i in ids])
        assert parts == [
            *("", "", "", "🙂", "a", "b", "", "", "漢", "", "", "字", "\ufffd"),
            *("\ufffd", " the", "", "", "\ufffd", ""),
        ]
        assert "".join(parts) == TOKENIZER.decode(ids)

    def test_text_in_the_middle_of_a_character(self):
        ids = byte_ids("🙂".encode()[:2]) + ids_of("▁the") + byte_ids(b"\x80") + ids_of("a")
        parts = deltas(TextStream(TOKENIZER), [[i] for i in ids])
        assert parts == ["", "", "\ufffd\ufffd the", "\ufffd", "a", ""]

    def test_skipped_ids_in_the_middle_of_a_character(self):
        first, *rest = byte_ids("é".encode())
        assert deltas(TextStream(TOKENIZER), [[first], ids_of("<|turn>"), rest]) == [
            *("", "", "é", "")
        ]

    def test_half_a_character_at_the_end(self):
        assert deltas(TextStream(TOKENIZER), [byte_ids("a🙂".encode()[:4])]) == ["a", "\ufffd" * 3]

    @pytest.mark.parametrize("tokens", [["▁the"], ["▁▁", "▁", "a"], ["▁"], ["\n\n", "▁a", "▁a"]])
    def test_leading_spaces(self, tokens):
        parts = deltas(TextStream(TOKENIZER), [[i] for i in ids_of(*tokens)])
        assert "".join(parts) == "".join(tokens).replace("▁", " ")

    def test_nothing(self):
        assert deltas(TextStream(TOKENIZER), []) == [""]
        assert deltas(TextStream(TOKENIZER), [[], []]) == ["", "", ""]

    @settings(deadline=None)
    @given(id_lists, st.lists(st.integers(0, 4)), st.booleans())
    def test_pieces_are_the_one_shot_text(self, ids, sizes, skip_special):
        whole = TOKENIZER.decode(ids, skip_special)
        at_once = TextStream(TOKENIZER, skip_special=skip_special)
        assert "".join(deltas(at_once, chunked(ids, sizes))) == whole
        # at most three bytes, each worth one mark, are ever held back
        stream, shown = TextStream(TOKENIZER, skip_special=skip_special), ""
        for num_ids, token_id in enumerate(ids, 1):
            shown += stream.push([token_id])
            assert len(TOKENIZER.decode(ids[:num_ids], skip_special)) - len(shown) <= 3
        assert shown + stream.finish() == whole


class TestStopStrings:
    def test_over_several_tokens(self):
        stream = TextStream(TOKENIZER, ["abc"])
        assert deltas(stream, [[i] for i in ids_of("xa", "b", "cd")]) == ["x", "", "", ""]
        assert stream.stopped
        assert stream.stop_index == 2

    def test_near_miss_gives_everything(self):
        stream = TextStream(TOKENIZER, ["abc"])
        assert deltas(stream, [[i] for i in ids_of("xa", "b", "e")]) == ["x", "", "abe", ""]
        assert not stream.stopped
        assert stream.stop_index is None

    def test_held_beginning_comes_out_at_the_end(self):
        stream = TextStream(TOKENIZER, ["abc"])
        assert deltas(stream, [spell("xab")]) == ["x", "ab"]
        assert not stream.stopped

    def test_a_miss_may_hold_the_next_beginning(self):
        stream = TextStream(TOKENIZER, ["aab"])
        assert deltas(stream, [[i] for i in spell("aaab")]) == ["", "", "a", "", ""]
        assert stream.stop_index == 3

    @pytest.mark.parametrize(
        ("stop", "text", "expected", "stop_index"),
        [
            (["ab", "abc"], "xabc", "x", 2),
            (["abd", "abc"], "xabc", "x", 3),
            (["abcd", "bc"], "xabcd", "xa", 3),
            (["bc", "abc"], "xabc", "x", 3),
            (["x"], "xabc", "", 0),
            (["\n\n"], "a\n\nb", "a", 2),
            (" a", "x a", "x", 2),
        ],
    )
    def test_first_complete_wins(self, stop, text, expected, stop_index):
        stream = TextStream(TOKENIZER, stop)
        assert "".join(deltas(stream, [spell(text)])) == expected
        assert stream.stop_index == stop_index

    def test_stop_string_in_the_output(self):
        stream = TextStream(TOKENIZER, ["abc"], include_stop=True)
        assert deltas(stream, [[i] for i in ids_of("xa", "b", "cd")]) == ["x", "", "abc", ""]

    def test_beside_bytes_of_characters(self):
        ids = byte_ids("é".encode()) + spell("ab") + byte_ids("🙂".encode()[:2]) + spell("ab🙂")
        stream = TextStream(TOKENIZER, ["ab🙂"])
        assert "".join(deltas(stream, [[i] for i in ids])) == "éab\ufffd\ufffd"
        assert stream.stop_index == len(ids) - 1

    def test_completed_by_the_marks_of_the_end(self):
        stream = TextStream(TOKENIZER, ["a\ufffd"])
        assert deltas(stream, [spell("xa"), byte_ids(b"\xe6")]) == ["x", "", ""]
        assert stream.stop_index == 2

    def test_nothing_comes_after_the_stop(self):
        stream = TextStream(TOKENIZER, ["b"])
        assert stream.push(spell("ab")) == "a"
        assert stream.push(spell("cab")) == ""
        assert stream.finish() == ""
        assert stream.stop_index == 1

    @pytest.mark.parametrize("stop", [[""], ["a", 3], [None]])
    def test_other_values_are_refused(self, stop):
        with pytest.raises(ValueError, match="stop: expected texts of at least one character"):
            TextStream(TOKENIZER, stop)

    @settings(max_examples=300, deadline=None)
    @given(
        text=st.text("ab\né", max_size=30),
        stop=st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=3),
        sizes=st.lists(st.integers(0, 4)),
        include_stop=st.booleans(),
    )
    def test_streamed_is_the_text_cut_at_the_first_stop(self, text, stop, sizes, include_stop):
        ids = spell(text)
        expected = text_at_first_stop(text, stop, include_stop)
        one_by_one = TextStream(TOKENIZER, stop, include_stop)
        at_once = TextStream(TOKENIZER, stop, include_stop)
        shown = ""
        for i, token_id in enumerate(ids):
            shown += one_by_one.push([token_id])
            assert expected.startswith(shown)
            if one_by_one.stopped:
                assert one_by_one.stop_index == i
                break
            # no more is held back than a beginning of a stop string
            held = TOKENIZER.decode(ids[: i + 1])[len(shown) :].rstrip("\ufffd")
            assert held == "" or any(s.startswith(held) for s in stop)
        assert shown + one_by_one.finish() == expected
        assert "".join(deltas(at_once, chunked(ids, sizes))) == expected
        assert at_once.stop_index == one_by_one.stop_index


def test_work_per_token_does_not_grow():
    ids = spell("the cat \n sat ") * 2000
    stream = TextStream(TOKENIZER, ["never", "\n\n"])
    start = time.perf_counter()
    for token_id in ids:
        stream.push([token_id])
    # 28,000 ids: about 0.1 s, against minutes for a decoder that starts from the beginning
    assert time.perf_counter() - start < 5


class TestThoughts:
    def split(self, ids, chunk=1, **options):
        splitter = ThoughtSplitter(TOKENIZER, **options)
        parts = [splitter.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
        parts.append(splitter.finish())
        return Split("".join(p.thought for p in parts), "".join(p.answer for p in parts)), splitter

    @pytest.mark.parametrize("chunk", [1, 2, 3, 100])
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("<|channel>thought\nwhy\n<channel|>the answer", ("why\n", "the answer")),
            ("<|channel>thought\n\nwhy<channel|>\n x", ("\nwhy", "\n x")),
            ("<|channel>thought\n<channel|>x", ("", "x")),
            ("<|channel>thought<channel|>x", ("", "x")),
            ("<|channel>though<channel|>x", ("though", "x")),
            ("<|channel>the<channel|>x", ("the", "x")),
            ("<|channel><channel|>x", ("", "x")),
            ("no thought", ("", "no thought")),
            ("x<channel|>y", ("", "xy")),
            ("<|channel>thought\na<|channel>b<channel|>c", ("ab", "c")),
            ("<|channel>th<|channel>x<channel|>c", ("thx", "c")),
            ("<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d", ("ac", "bd")),
            ("<|channel>thought\nnever ends", ("never ends", "")),
            ("", ("", "")),
        ],
    )
    def test_both_texts(self, chunk, text, expected):
        assert self.split(TOKENIZER.encode(text)[1:], chunk)[0] == expected

    def test_text_that_spells_the_borders_is_text(self):
        typed = "<|channel>thought\nx<channel|>"
        assert self.split(spell(typed))[0] == ("", typed)

    def test_a_character_cut_by_a_border(self):
        first, second = byte_ids("é".encode())
        open_id, close_id = ids_of("<|channel>", "<channel|>")
        found, _ = self.split([open_id, first, close_id, second, *spell("a")])
        assert found == ("\ufffd", "\ufffda")

    @pytest.mark.parametrize("chunk", [1, 3, 100])
    def test_stop_strings_concern_the_answer(self, chunk):
        ids = TOKENIZER.encode("<|channel>thought\nstop<channel|>a stop b")[1:]
        found, splitter = self.split(ids, chunk, stop=["stop"])
        assert found == ("stop", "a ")
        # the index counts all ids, those of the thought too
        assert TOKENIZER.decode(ids[: splitter.stop_index + 1]).endswith("a stop")
        assert splitter.stopped

    def test_vocabulary_without_channels(self):
        backend = build_backend()
        tokenizer = Tokenizer(backend)
        tokenizer.token_id = lambda token: None  # as if the borders did not exist
        assert ThoughtSplitter(tokenizer).push(spell("ab")) == ("", "ab")

    @settings(deadline=None)
    @given(id_lists, st.lists(st.integers(0, 4)))
    def test_answer_is_the_text_outside_the_borders(self, ids, sizes):
        borders = ids_of("<|channel>", "<channel|>")
        outside, is_inside = [], False
        for i in ids:
            if i in borders:
                is_inside = i == borders[0]
            elif not is_inside:
                outside.append(i)
        splitter = ThoughtSplitter(TOKENIZER)
        parts = [*(splitter.push(chunk) for chunk in chunked(ids, sizes)), splitter.finish()]
        assert "".join(part.answer for part in parts) == TOKENIZER.decode(outside)


def test_every_control_token_is_invisible():
    assert "".join(deltas(TextStream(TOKENIZER), [[i] for i in range(len(CONTROL))])) == ""
