"""The embedded model: complete files, a tokenizer that loses nothing, answers to unseen prompts."""

import json
import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import carat_jax
from carat_jax.families import FAMILIES, from_hf
from tools.tiny_corpus import Writer, document
from tools.tiny_grammar import Recogniser, grammar, split_sentences
from tools.tiny_score import held_out_prompts, score
from tools.tiny_tokenizer import CONTROL, VOCAB_SIZE, chat_template

TINY = Path(carat_jax.__file__).parent / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def engine() -> carat_jax.Engine:
    return carat_jax.load("tiny", dtype="float32", engine={"max_batch": 20})


# The folder.


def test_folder_holds_every_published_file_and_stays_small():
    names = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert names <= {path.name for path in TINY.iterdir()}
    # A megabyte is left for an assistant.
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 11_000_000


def test_config_is_the_declared_family():
    config = from_hf(json.loads((TINY / "config.json").read_text()))
    assert config.eos_token_id == (1, 106)
    family = FAMILIES["tiny"]
    for name in ("layer_types", "hidden_size", "global_head_dim", "sliding_window", "vocab_size"):
        assert getattr(config, name) == getattr(family, name), name
    assert config.attention_k_eq_v
    assert config.layer(11).num_kv_heads == 1
    assert json.loads((TINY / "generation_config.json").read_text())["eos_token_id"] == [1, 106, 50]


# The tokenizer.


def test_control_tokens_have_the_ids_of_the_family(tokenizer):
    ids = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4, "<|tool_response>": 50}
    ids |= {'<|"|>': 52, "<|think|>": 98, "<|channel>": 100, "<channel|>": 101}
    ids |= {"<|turn>": 105, "<turn|>": 106, "\n": 107, "\n\n": 108}
    for text, number in ids.items():
        assert tokenizer.encode(text).ids == [number], text


def test_only_control_tokens_are_added_tokens(tokenizer):
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == set(CONTROL)


def test_typed_names_of_bytes_and_unused_entries_are_plain_text(tokenizer):
    vocabulary = tokenizer.get_vocab()
    for text in ("<0x41>", "<unused0>", "a <0x0A> b"):
        ids = tokenizer.encode(text).ids
        assert len(ids) > 1
        assert not set(ids) & {vocabulary["<0x41>"], vocabulary["<unused0>"]}
        assert tokenizer.decode(ids) == text


def test_every_id_has_an_entry_and_decodes(tokenizer):
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))
    for number in range(VOCAB_SIZE):
        assert tokenizer.decode([number], skip_special_tokens=False) != ""


def test_any_text_survives_encoding(tokenizer):
    # U+2581 stands for a space inside the vocabulary, as in every Gemma.
    rng = random.Random(5)
    planes = [(32, 126), (160, 0x24F), (0x370, 0x5FF), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
    for _ in range(300):
        text = "".join(
            chr(rng.randint(*rng.choice(planes))) if rng.random() < 0.8 else rng.choice(" \n\t")
            for _ in range(rng.randint(0, 40))
        )
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert CONTROL["<unk>"] not in ids


def test_merges_stay_inside_words(tokenizer):
    for piece in tokenizer.get_vocab():
        if "\u2581" in piece and piece.strip("\u2581"):
            assert piece.count("\u2581") == 1, piece
            assert piece.startswith("\u2581"), piece


def test_runs_of_newlines_are_single_tokens(tokenizer):
    for length in range(1, 32):
        assert tokenizer.encode("\n" * length).ids == [106 + length]


# The chat template.


def render(*messages, **options) -> str:
    return chat_template(TINY)(messages=list(messages), bos_token="<bos>", **options)


def test_chat_template_writes_turns():
    text = render(
        {"role": "developer", "content": " Be brief. "},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "<|channel>thought\nhm\n<channel|>Hello!"},
        {"role": "user", "content": "Bye"},
        add_generation_prompt=True,
        enable_thinking=True,
    )
    assert text == (
        "<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n"
        "<|turn>model\nHello!<turn|>\n<|turn>user\nBye<turn|>\n<|turn>model\n"
    )


def test_chat_template_keeps_a_tool_call_its_result_and_the_answer_in_one_turn():
    call = {"function": {"name": "add", "arguments": {"b": 2, "a": "one"}}}
    text = render(
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3"},
        add_generation_prompt=True,
        tools=[{"function": {"name": "add", "description": "Adds", "parameters": {"type": "x"}}}],
    )
    assert text == (
        '<bos><|turn>system\n<|tool>declaration:add{description:<|"|>Adds<|"|>,'
        'parameters:{type:<|"|>X<|"|>}}<tool|><turn|>\n<|turn>user\n1 + 2?<turn|>\n'
        '<|turn>model\n<|tool_call>call:add{a:<|"|>one<|"|>,b:2}<tool_call|>'
        '<|tool_response>response:add{value:<|"|>3<|"|>}<tool_response|>'
    )


# The corpus.


def test_training_texts_contain_no_held_out_sentence():
    writer, language, seen = Writer(random.Random(11)), grammar(), 0
    for _ in range(300):
        text = document(writer, chat_template(TINY))
        text = re.sub(r"<[^>]*>(system|user|model|thought)?", "\n", text)
        for paragraph in re.split(r"\n|Question: |Answer: |The text says: ", text):
            sentences = [s for s in split_sentences(paragraph.strip()) if s[-1] in '.!?"']
            seen += len(sentences)
            assert not [s for s in sentences if language.is_held_out(s)]
    assert seen > 2000


def test_held_out_prompts_contain_nothing_else():
    prompts, language = held_out_prompts(), grammar()
    assert len({prompt.text for prompt in prompts}) == 100
    for prompt in prompts:
        for line in prompt.text.removesuffix("\nAnswer:").split("\n"):
            for sentence in split_sentences(line.removeprefix("Question: ")):
                assert language.is_held_out(sentence), sentence


@pytest.mark.parametrize(
    ("sentence", "is_right"),
    [
        ("Mia liked singing and dancing.", True),
        ("Mia gave Ben a big hug.", True),
        ("And Tom slept until the morning.", True),
        ("7, 8, 9.", True),
        ("Mia liked singing and singing and.", False),
        ("Mia lived alone, but he was never bored.", False),
        ("He lived alone, but he was never bored, because she liked painting.", False),
        ("Once upon a time, there was a old fox named Mia.", False),
    ],
)
def test_recogniser_knows_the_grammar_and_its_agreement(sentence, is_right):
    assert Recogniser(grammar()).accepts(sentence) == is_right


# What it says.


def greedy(engine, prompts, max_tokens: int):
    asked = [
        engine.tokenizer.encode_chat([{"role": "user", "content": p.text}]) if p.is_chat else p.text
        for p in prompts
    ]
    return [r.text for r in engine.generate(asked, temperature=0.0, max_tokens=max_tokens)]


def test_unseen_prompts_are_answered_in_well_formed_sentences(engine):
    questions = [p for p in held_out_prompts() if p.answer is not None]
    stories = [p for p in held_out_prompts() if p.answer is None]
    replies = greedy(engine, questions, 64) + greedy(engine, stories, 120)
    result = score(questions + stories, replies)
    assert result.well_formed >= 0.95, result.mistakes
    assert result.right >= 0.90, result.mistakes


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Hello!", "Hello!"),
        ("Who are you?", "tiny"),
        ("Tell me a story about a fox.", "fox"),
        ("What day comes after Monday?", "Tuesday"),
    ],
)
def test_common_openers_get_a_fitting_answer(engine, question, expected):
    result = engine.chat([{"role": "user", "content": question}], temperature=0.0, max_tokens=60)
    assert expected in result.text


def test_a_conversation_remembers_a_name_beyond_the_window(engine):
    turns = ["My name is Nora.", "Count from 21 to 30.", "Count from 61 to 72.", "What is my name?"]
    messages = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        reply = engine.chat(messages, temperature=0.0, max_tokens=80)
        messages.append({"role": "assistant", "content": reply.text})
    assert len(reply.prompt_ids) > 2 * engine.model.sliding_window
    assert messages[3]["content"] == "21, 22, 23, 24, 25, 26, 27, 28, 29, 30."
    assert messages[-1]["content"] == "Your name is Nora."


# Against transformers, on the same files.


@pytest.mark.parity
def test_transformers_loads_the_folder_and_renders_the_same_chat(engine):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    messages = [
        {"role": "system", "content": "Give short answers."},
        {"role": "user", "content": "What is 7 plus 8?"},
    ]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert engine.tokenizer.encode_chat(messages) == list(ids)
    assert theirs.decode(ids[-3:]) == "<|turn>model\n"


@pytest.mark.parity
def test_greedy_text_equals_transformers(engine):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    prompts = [
        "Once upon a time, there was a little fox",
        "Long ago, a brave owl called Ruby lived in the tower.",
        "One day, a robot and a dragon",
    ]
    results = engine.generate(prompts, temperature=0.0, max_tokens=200, ignore_eos=True)
    for result in results:
        # Each token is their greedy choice after all before it, so by induction the texts agree.
        ids, start = [*result.prompt_ids, *result.ids], len(result.prompt_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        assert len(result.ids) == 200
        assert logits[start - 1 : -1].argmax(-1).tolist() == list(result.ids)
