"""From the settings to a drafter: what is opened, and what is refused in one line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax import convert
from carat_jax.assistant_families import ASSISTANTS
from carat_jax.config import read_settings
from carat_jax.engine.drafting import open_drafter
from carat_jax.families import FAMILIES, named_size
from carat_jax.model.assistant import Assistant
from carat_jax.model.params import split
from carat_jax.numerics.options import PLAIN
from tests.assistant_pair import F32, pair
from tests.assistant_toys import assistant_config, assistant_weights, write_assistant
from tests.toys import CONFIGS, make_weights, write_checkpoint


def opened(folder, **settings):
    """The drafter of a toy target in `folder`, by settings of the section `decode`."""
    keywords = {"model": str(folder), "dtype": "float32", "decode": settings}
    config = read_settings(keywords=keywords).build()
    return open_drafter(config, pair().target.config, folder, PLAIN).loaded()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target's folder with its assistant inside."""
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, CONFIGS["T4"], make_weights(CONFIGS["T4"]))
    write_assistant(folder / "assistant", pair().raw, pair().weights)
    return folder


def test_the_assistant_inside_the_targets_folder_is_opened(target):
    for name in ("assistant", "combined"):
        drafting = opened(target, drafter=name, draft_len=2)
        assert (drafting.drafter.name, drafting.drafter.num_drafts) == (name, 2)
        jax.tree.map(np.testing.assert_array_equal, drafting.params, pair().params)
    assert opened(target, drafter="assistant", draft_len="auto").drafter.num_drafts == 7


def test_a_named_assistant_comes_first_and_may_be_converted(target, tmp_path):
    drafter = pair("T4", "random")
    write_assistant(tmp_path / "source", drafter.raw, drafter.weights)
    assert convert.main(["convert", str(tmp_path / "source"), str(tmp_path / "orbax")]) == 0
    for folder in ("source", "orbax"):
        made = opened(target, drafter="assistant", draft_model=str(tmp_path / folder))
        jax.tree.map(np.testing.assert_array_equal, made.params, drafter.params)


def test_an_assistant_is_converted_with_its_target(target, tmp_path):
    assert convert.main(["convert", str(target), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "assistant" / "manifest.json").is_file()
    assert not (tmp_path / "out" / "assistant" / "model.safetensors").exists()
    made = opened(tmp_path / "out", drafter="assistant")
    jax.tree.map(np.testing.assert_array_equal, made.params, pair().params)


def test_a_size_cut_to_its_first_layers_has_the_assistant_of_the_whole():
    keywords = {"model": "random:31b/6", "decode": {"drafter": "assistant"}}
    config = read_settings(keywords=keywords).build()
    made = open_drafter(config, named_size("31b/6"), None, PLAIN)
    whole = Assistant(ASSISTANTS["31b"], FAMILIES["31b"], jnp.dtype("bfloat16"))
    assert made.specs == split(whole)[1]
    assert made.params == ()


def test_a_smaller_model_is_opened_with_caches_of_its_own(target):
    made = opened(target, drafter="model", draft_model=str(target), draft_len=2)
    assert made.model == pair().target.config
    assert made.drafter.num_drafts == 2
    leaves = jax.tree.leaves(made.params)
    assert all(leaf.dtype == F32 for leaf in leaves)


def test_what_cannot_draft_is_refused_with_the_reason_and_both_numbers(target, tmp_path):
    wide = CONFIGS["T4"] | {"hidden_size": 72}
    raw = assistant_config(wide)
    write_assistant(tmp_path / "wide", raw, assistant_weights(raw))
    other = CONFIGS["T4"] | {"vocab_size": 330}
    write_checkpoint(tmp_path / "other", other, make_weights(other))
    write_checkpoint(tmp_path / "bare", CONFIGS["T4"], make_weights(CONFIGS["T4"]))
    refusals = [
        ({"drafter": "none", "simulate_acceptance": 2.0}, ["nothing to accept"]),
        ({"drafter": "ngram", "sample_drafts": True}, ["sample_drafts", "'ngram'"]),
        ({"drafter": "ngram", "uniform_rows": 3, "draft_len": 3}, ["3 rows", "draft_len=3", "4"]),
        ({"drafter": "ngram", "uniform_rows": 5, "draft_len": "auto"}, ["5 rows", "=7", "8"]),
        ({"drafter": "model"}, ["'model'", "decode.draft_model"]),
        ({"drafter": "model", "draft_model": tmp_path / "other"}, ["330", "320"]),
        (
            {"drafter": "assistant", "draft_model": tmp_path / "wide"},
            ["backbone_hidden_size=72", "hidden_size=64"],
        ),
        ({"drafter": "assistant", "draft_model": "random:99b"}, ["'99b'", "31b"]),
        *(
            ({"drafter": name, "draft_model": "nope"}, ["decode.draft_model: nope: no such folder"])
            for name in ("assistant", "combined", "model")
        ),
    ]
    for decode, words in refusals:
        named = {k: str(v) if k == "draft_model" else v for k, v in decode.items()}
        with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the words are looked at)
            opened(target, **named)
        for word in words:
            assert word in str(refusal.value), decode
    with pytest.raises(ValueError, match=r"needs an assistant and .*bare holds none"):
        opened(tmp_path / "bare", drafter="assistant")
