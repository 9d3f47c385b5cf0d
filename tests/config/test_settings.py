"""Precedence, settings from Python, the shipped files, and what `describe` prints."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from carat_jax.config import KEYS, CacheConfig, Config, SamplingParams, read_settings, sampling_from
from carat_jax.families import FAMILIES
from tests.config.reading import origins_of, refusal

# Ablations are plans of their own kind, read by tests/bench.
CONFIGS = sorted(
    path
    for path in Path(__file__).parents[2].glob("configs/**/*.yaml")
    if path.parent.name != "ablations"
)


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
