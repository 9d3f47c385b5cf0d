"""Settings: the typing rule, precedence, refusals, and what `describe` prints."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from carat_jax.config import (
    KEYS,
    CacheConfig,
    Config,
    SamplingParams,
    read_settings,
    sampling_from,
)
from carat_jax.families import FAMILIES

# Ablations are plans of their own kind, read by tests/bench.
CONFIGS = sorted(
    path
    for path in Path(__file__).parents[1].glob("configs/**/*.yaml")
    if path.parent.name != "ablations"
)


def values_of(settings) -> dict:
    return {key: value for key, value, _ in settings.items()}


def origins_of(settings) -> dict:
    return {key: origin for key, _, origin in settings.items()}


def refusal(*args, **kwargs) -> str:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:  # one line, always
        read_settings(*args, **kwargs)
    return str(caught.value)


@pytest.fixture
def write(tmp_path):
    def write_yaml(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_yaml


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
        ("qqqq", "known keys: model, dtype, sampling, cache, attention, moe, decode, engine"),
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


# ---- precedence ----


@pytest.mark.parametrize(
    ("name", "published", "checkpoint", "in_file", "on_line"),
    [
        ("temperature", "temperature", 0.3, 0.5, 0.7),
        ("top_k", "top_k", 11, 12, 13),
        ("top_p", "top_p", 0.3, 0.4, 0.5),
        ("min_p", "min_p", 0.1, 0.2, 0.3),
        ("max_tokens", "max_new_tokens", 21, 22, 23),
        ("seed", None, None, 32, 33),
        ("repetition_penalty", "repetition_penalty", 1.1, 1.2, 1.3),
    ],
)
def test_later_sources_win(write, name, published, checkpoint, in_file, on_line):
    key = f"sampling.{name}"
    path = write(f"{key}: {in_file}\n")
    generation = {published: checkpoint} if published else {}

    def effective(settings):
        settings = settings.with_generation_config(generation, "generation_config.json")
        return getattr(settings.build().sampling, name), origins_of(settings)[key]

    built_in = getattr(SamplingParams(), name)
    lowest = (checkpoint, "generation_config.json") if published else (built_in, "built-in")
    assert effective(read_settings()) == lowest
    assert effective(read_settings(path)) == (in_file, f"{path}:1")
    both = read_settings(path, [f"{key}={in_file}", f"{key}={on_line}"])
    assert effective(both) == (on_line, "--set")
    by_keyword = read_settings(path, [f"{key}={on_line}"], {"sampling": {name: in_file}})
    assert effective(by_keyword) == (in_file, "keyword")


@pytest.mark.parametrize(
    ("key", "earlier", "explicit", "expected"),
    [
        ("temperature", "0.7", "0", 0.0),
        ("top_k", "5", "0", 0),
        ("top_k", "5", "null", 0),
        ("top_p", "0.5", "null", 1.0),
        ("max_tokens", "5", "0", 0),
        ("seed", "5", "0", 0),
        ("seed", "5", "null", None),
        ("logprobs", "5", "0", 0),
        ("ignore_eos", "true", "false", False),
        ("stop", "[a, b]", '""', ()),
        ("stop", "[a, b]", "[]", ()),
        ("logit_bias", "{1: 2}", "{}", ()),
    ],
)
def test_explicit_nothing_beats_an_earlier_something(write, key, earlier, explicit, expected):
    published = {"temperature": 0.9, "top_k": 64, "top_p": 0.95, "max_new_tokens": 99}
    text = f"sampling:\n  {key}: "

    def effective(settings):
        config = settings.with_generation_config(published, "generation_config.json").build()
        return getattr(config.sampling, key)

    assert effective(read_settings(write(text + explicit))) == expected
    path = write(text + earlier)
    assert effective(read_settings(path)) != expected
    assert effective(read_settings(path, [f"sampling.{key}={explicit}"])) == expected


def test_generation_config_of_the_checkpoint():
    published = {
        "bos_token_id": 2,
        "do_sample": True,
        "eos_token_id": [1, 106, 50],
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
        "min_p": None,
        "transformers_version": "5.17.0",
    }
    settings = read_settings().with_generation_config(published, "g.json")
    assert settings.build().sampling == SamplingParams(temperature=1.0, top_k=64, top_p=0.95)
    assert origins_of(settings)["sampling.min_p"] == "built-in"

    # do_sample: false means greedy, whatever temperature stands beside it
    greedy = read_settings().with_generation_config(published | {"do_sample": False}, "g.json")
    assert greedy.build().sampling.temperature == 0
    assert origins_of(greedy)["sampling.temperature"] == "g.json (do_sample: false)"
    hotter = read_settings(overrides=["sampling.temperature=0.8"])
    hotter = hotter.with_generation_config(published | {"do_sample": False}, "g.json")
    assert hotter.build().sampling.temperature == 0.8

    # overriding one value keeps the checkpoint's others
    one = read_settings(overrides=["sampling.temperature=0.5"])
    one = one.with_generation_config(published, "g.json").build().sampling
    assert one == SamplingParams(temperature=0.5, top_k=64, top_p=0.95)

    for broken in ({"top_p": 0}, {"temperature": "hot"}, {"do_sample": "perhaps"}, {"top_k": -1}):
        with pytest.raises(ValueError, match=r"\Ag\.json: .*(top_p|temperature|do_sample|top_k)"):
            read_settings().with_generation_config(broken, "g.json")


def test_another_checkpoint_replaces_the_first_ones_defaults():
    first = read_settings().with_generation_config({"top_k": 64}, "a.json")
    assert first.with_generation_config({"top_p": 0.5}, "b.json").build().sampling.top_k == 0


# ---- Python values ----


def test_keywords_nested_dotted_and_whole_sections():
    expected = SamplingParams(top_k=5, stop=("a",))
    for keywords in (
        {"sampling": {"top_k": 5, "stop": "a"}},
        {"sampling.top_k": 5, "sampling.stop": ["a"]},
        {"sampling": expected},
    ):
        assert read_settings(keywords=keywords).build().sampling == expected
    # A whole section states all of its keys, so the checkpoint's defaults do not apply to it.
    whole = read_settings(keywords={"sampling": expected})
    assert whole.with_generation_config({"top_p": 0.5}, "g.json").build().sampling == expected
    assert "does not belong" in refusal(keywords={"sampling": CacheConfig()})
    assert "not a section" in refusal(keywords={"sampling": 3})


def test_a_config_counts_as_given_in_full_and_keywords_replace_its_parts():
    config = Config(model="some/folder", sampling=SamplingParams(temperature=0.5))
    settings = read_settings(config, keywords={"engine.max_batch": 2})
    settings = settings.with_generation_config({"temperature": 0.9, "top_k": 64}, "g.json")
    assert settings.build() == dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, max_batch=2)
    )


def test_dataclasses_check_and_convert_themselves():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), stop="x", logit_bias={7: 1, 2: 0.5}
    )
    assert params == SamplingParams(
        temperature=0.5, top_k=3, stop=("x",), logit_bias=((2, 0.5), (7, 1.0))
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert Config(model=Path("a/b")).model == "a/b"
    for bad in (
        {"temperature": math.nan},
        {"temperature": True},
        {"top_k": 2.5},
        {"stop": 5},
        {"stop_token_ids": [True]},
        {"max_tokens": -1},
    ):
        name = next(iter(bad))
        with pytest.raises(ValueError, match=rf"\Asampling\.{name}: "):
            SamplingParams(**bad)
    with pytest.raises(ValueError, match=r"sampling: .* is not a SamplingParams"):
        Config(sampling={"top_k": 3})


def test_sampling_from_merges_and_refuses():
    base = SamplingParams(temperature=0.7, top_k=5, seed=3, stop=("a",))
    assert sampling_from(base) == base
    merged = sampling_from(base, temperature=0, seed=None, stop="", top_k=None)
    assert merged == SamplingParams(temperature=0.0)
    with pytest.raises(ValueError, match=r"\Atemprature: 1: unknown key; did you mean temperature"):
        sampling_from(base, temprature=1)
    with pytest.raises(ValueError, match=r"\Ap\.jsonl:3: sampling\.top_p: 2 is not possible"):
        sampling_from(base, "p.jsonl:3", top_p=2)


def test_configs_are_hashable_frozen_and_equal_by_value():
    override = ["sampling.logit_bias={5: 1}", "sampling.stop=[a]"]
    one, two = (read_settings(overrides=override).build() for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.sampling.top_k = 3


# ---- what is there ----


def test_every_default_is_valid():
    config = read_settings().build()
    assert config == Config()
    for name, key in KEYS.items():
        assert key.check(key.default) == key.default, name


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_have_random_weights(name):
    assert Config(model=f"random:{name}").model == f"random:{name}"


def test_every_setting_is_documented():
    for name in KEYS:
        section, _, field = name.rpartition(".")
        owner = type(getattr(Config(), section)) if section else Config
        assert f"\n      {field}: " in owner.__doc__, name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    assert read_settings(path).build().model


def test_describe_names_every_key_value_and_origin(write):
    path = write("sampling:\n  seed: 0\n")
    settings = read_settings(path, ["sampling.stop=é"]).with_generation_config({"top_k": 64}, "g")
    lines = settings.describe().splitlines()
    assert len(lines) == len(KEYS)
    split = [[part.strip() for part in line.split("  # ")] for line in lines]
    assert ["sampling.seed: 0", f"{path}:2"] in split
    assert ["sampling.top_k: 64", "g"] in split
    assert ['sampling.stop: ["é"]', "--set"] in split
    assert ["sampling.top_p: 1.0", "built-in"] in split
    assert yaml.safe_load(settings.describe())["engine.max_batch"] == Config().engine.max_batch


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 1e6),
        top_p=st.floats(0, 1, exclude_min=True),
        seed=st.none() | st.integers(0, 2**32 - 1),
        stop=st.lists(
            st.text(st.characters(exclude_categories=("Cs",)), min_size=1), max_size=3
        ).map(tuple),
        logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-1e9, 1e9), max_size=3),
    )
)
def test_described_settings_read_back_as_the_same_configuration(tmp_path_factory, params):
    config = Config(sampling=params)
    path = tmp_path_factory.mktemp("described") / "again.yaml"
    path.write_text(read_settings(config).describe(), encoding="utf-8")
    assert read_settings(path).build() == config
