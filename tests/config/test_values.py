"""What a key takes, in a file and on the command line, and how the rest is refused."""

import pytest

from carat_jax.config import read_settings
from tests.config.reading import refusal, values_of

# Text of one scalar or flow value -> what the key must become, in a file and on the command line.
CONVERTED = [
    ("sampling.temperature", "1e-1", 0.1),
    ("sampling.temperature", "1E-1", 0.1),
    ("sampling.temperature", '"0.1"', 0.1),
    ("sampling.temperature", "1", 1.0),
    ("sampling.temperature", "0", 0.0),
    ("sampling.max_tokens", "1e2", 100),
    ("sampling.max_tokens", "1E+2", 100),
    ("sampling.max_tokens", "100.0", 100),
    ("sampling.max_tokens", "1_000", 1000),
    ("sampling.max_tokens", "'7'", 7),
    ("sampling.max_tokens", "0", 0),
    ("sampling.ignore_eos", "no", False),
    ("sampling.ignore_eos", "off", False),
    ("sampling.ignore_eos", '"false"', False),
    ("sampling.ignore_eos", "True", True),
    ("sampling.ignore_eos", "yes", True),
    ("sampling.stop", "123", ("123",)),
    ("sampling.stop", "no", ("no",)),
    ("sampling.stop", "1e-1", ("1e-1",)),
    ("sampling.stop", "[no, 'null', 5]", ("no", "null", "5")),
    ("sampling.stop", '""', ()),
    ("sampling.stop", "null", ()),
    ("sampling.stop", "", ()),
    ("sampling.stop", '"\\n"', ("\n",)),
    ("sampling.stop_token_ids", '[1, "106"]', (1, 106)),
    ("sampling.stop_token_ids", "106", (106,)),
    ("sampling.seed", "null", None),
    ("sampling.seed", "~", None),
    ("sampling.seed", "", None),
    ("sampling.seed", "0", 0),
    ("sampling.top_k", "null", 0),
    ("sampling.top_p", "null", 1.0),
    ("sampling.min_p", "null", 0.0),
    ("sampling.logprobs", "0", 0),
    ("sampling.logit_bias", "{7: -1e3, '2': 5}", ((2, 5.0), (7, -1000.0))),
    ("sampling.logit_bias", "[[7, 1.5], [2, 5]]", ((2, 5.0), (7, 1.5))),
    ("attention.pad_keys", '"64"', 64),
    ("attention.impl", "none", None),
    ("decode.drafter", "none", "none"),
    ("engine.prefill_chunks", "[8, 1e2]", (8, 100)),
    ("engine.max_context", "null", None),
    ("model", "random:31b", "random:31b"),
    ("model", "2024-01-01", "2024-01-01"),
]


@pytest.mark.parametrize(("key", "text", "expected"), CONVERTED)
def test_declared_type_decides_in_files_and_on_the_command_line(write, key, text, expected):
    nested = write(f"{key.replace('.', ':' + chr(10) + '  ')}: {text}\n")
    for settings in (read_settings(nested), read_settings(overrides=[f"{key}={text}"])):
        found = values_of(settings)[key]
        built = settings.build()
        for name in key.split("."):
            built = getattr(built, name)
        # Sorting of logit_bias happens when the dataclass is built.
        assert (built, type(built)) == (expected, type(expected))
        assert found == expected or key == "sampling.logit_bias"


REFUSED = [
    ("sampling.temperature", ".nan"),
    ("sampling.temperature", "nan"),
    ("sampling.temperature", ".inf"),
    ("sampling.temperature", "-0.1"),
    ("sampling.temperature", "hot"),
    ("sampling.temperature", "null"),
    ("sampling.temperature", "true"),
    ("sampling.temperature", "[1]"),
    ("sampling.top_p", "0"),
    ("sampling.top_p", "1.01"),
    ("sampling.top_p", "nan"),
    ("sampling.top_k", "-1"),
    ("sampling.top_k", "1.5"),
    ("sampling.top_k", "15e-1"),
    ("sampling.top_k", "10000000000000000000001e-1"),
    ("sampling.top_k", "1e99"),
    ("sampling.top_k", "yes"),
    ("sampling.max_tokens", "-1"),
    ("sampling.max_tokens", "010"),
    ("sampling.max_tokens", "0x10"),
    ("sampling.max_tokens", "1:30"),
    ("sampling.max_tokens", "null"),
    ("sampling.min_p", "1.5"),
    ("sampling.repetition_penalty", "0"),
    ("sampling.seed", "-1"),
    ("sampling.seed", "4294967296"),
    ("sampling.n", "0"),
    ("sampling.ignore_eos", "1"),
    ("sampling.ignore_eos", "maybe"),
    ("sampling.stop", "['']"),
    ("sampling.stop", "{a: 1}"),
    ("sampling.stop_token_ids", "[1, x]"),
    ("sampling.stop_token_ids", "[-1]"),
    ("sampling.logit_bias", "{1: .inf}"),
    ("sampling.logit_bias", "[[1, 2], [1, 3]]"),
    ("sampling.logit_bias", "[[1, 2, 3]]"),
    ("sampling.logprobs", "-1"),
    ("attention.pad_keys", "63"),
    ("cache.local_layers", "rings"),
    ("decode.draft_len", "0"),
    ("engine.prefill_chunks", "[]"),
    ("engine.prefill_chunks", "[8, 4]"),
    ("engine.prefill_chunks", "[0, 4]"),
    ("engine.prefill_chunks", "32,64"),
    ("engine.max_batch", "0"),
    ("model", "random:32b"),
    ("model", "null"),
    ("model", '""'),
    ("dtype", "float16"),
]


@pytest.mark.parametrize(("key", "text"), REFUSED)
def test_impossible_values_are_refused_with_key_value_and_line(write, key, text):
    path = write(f"# a comment\n{key}: {text}\n")
    message = refusal(path)
    assert message.startswith(f"{path}:2: {key}: ")
    scalar = text.strip("'\"[]{}").split(",")[0].split(":")[-1].strip()
    assert scalar in message
    # The same text on the command line meets the same rule.
    on_command_line = refusal(overrides=[f"{key}={text}"])
    assert on_command_line.partition(f"{key}: ")[2] == message.partition(f"{key}: ")[2]


def test_plain_text_on_the_command_line_is_literal():
    # given characters that YAML would read as a comment, an anchor, a mapping or a document
    for text in ("# end", "a: b", "&x", "*y", "x #y", "---", "<turn|>", "- a", "!t"):
        settings = read_settings(overrides=[f"sampling.stop={text}"])
        assert settings.build().sampling.stop == (text,)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("sampling.temperatur", "did you mean sampling.temperature?"),
        ("temperature", "did you mean sampling.temperature?"),
        ("max_tokens", "did you mean sampling.max_tokens?"),
        ("decode.max_tokens", "did you mean sampling.max_tokens?"),
        ("modle", "did you mean model?"),
        ("cach.local_layers", "did you mean cache.local_layers?"),
        (
            "qqqq",
            "known keys: model, dtype, sampling, cache, attention, products, moe, decode, engine",
        ),
        ("cache.zzzzzz", "known keys: cache.local_layers, cache.global_layers"),
    ],
)
def test_unknown_keys_name_the_nearest(write, key, nearest):
    path = write(f"dtype: float32\n{key}: 0.3\n")
    assert refusal(path) == f"{path}:2: {key}: '0.3': unknown key; {nearest}"
    assert refusal(overrides=[f"{key}=0.3"]) == f"--set: {key}: '0.3': unknown key; {nearest}"
    assert refusal(keywords={key: 0.3}) == f"keyword: {key}: 0.3: unknown key; {nearest}"


def test_facts_of_the_model_cannot_be_set(write):
    message = refusal(overrides=["model.sliding_window=512"])
    assert "model.sliding_window: '512'" in message
    assert "cannot be set" in message
    assert "model: " in refusal(write("model: {name: tiny}"))


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        (
            "sampling:\n  top_k: 1\n  top_k: 2\n",
            3,
            "sampling.top_k is given twice, first in line 2",
        ),
        ("sampling:\n  top_k: 1\nsampling:\n  seed: 2\n", 3, "sampling is given twice"),
        ("sampling:\n  top_k: 1\nsampling.top_k: 2\n", 3, "sampling.top_k is given twice"),
        ("sampling:\n  logit_bias: {1: 2, 1: 3}\n", 2, "'1' is given twice"),
        ("decode: mtp\n", 1, "decode: 'mtp' is not a section; its keys are: drafter, draft_len"),
        ("dtype: float32\nmodel: [a\n", 3, "not valid YAML"),
        ("dtype: float32\n---\ndtype: float32\n", 2, "not valid YAML"),
        ("- a\n", 1, "must hold"),
        ("model: !!python/name:os.system\n", 1, "is not supported"),
        ("sampling:\n  stop: &a [*a]\n", 2, "nested too deeply"),
    ],
)
def test_malformed_files_are_refused_with_the_line(write, text, line, part):
    path = write(text)
    message = refusal(path)
    assert message.startswith(f"{path}:{line}: ")
    assert part in message


def test_unreadable_files_are_refused(tmp_path, write):
    assert "absent.yaml: cannot be read" in refusal(tmp_path / "absent.yaml")
    assert "cannot be read" in refusal(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"model: \xff\xfe")
    assert "not UTF-8" in refusal(binary)
    assert "not valid YAML" in refusal(write("model: a\x01b"))


def test_empty_files_and_empty_sections_set_nothing(write):
    assert read_settings(write("")).given == {}
    assert read_settings(write("# nothing\n")).given == {}
    assert read_settings(write("sampling:\nengine: ~\n")).given == {}


def test_malformed_overrides_are_refused():
    assert refusal(overrides=["sampling.top_k"]) == "--set: 'sampling.top_k' is not key=value"
    assert "not key=value" in refusal(overrides=["=3"])
    assert "not valid YAML" in refusal(overrides=["sampling.stop=["])
