"""The engine's model against transformers on the same checkpoint folders, float32 and bfloat16."""

import dataclasses
import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16

from carat_jax.families import from_hf
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.load_hf import load_hf
from carat_jax.model.params import split
from tests.oracle import top2_gap
from tests.toy_model import MAX_ROWS, Toy, build
from tests.toys import CONFIGS, SIZES, make_ids, make_weights, write_checkpoint

pytestmark = pytest.mark.parity

LENGTH = 90  # the rings hold 13 or 21 positions: four turns and more


@pytest.fixture(scope="module")
def torch_model():
    return pytest.importorskip("tests.torch_model")


@functools.cache
def compiled(name: str, dtype) -> Toy:
    return build(CONFIGS[name], dtype=dtype)


def load(name: str, folder: Path, dtype) -> Toy:
    """The engine's model with config and weights read from the folder."""
    model = compiled(name, dtype)
    assert from_hf(json.loads((folder / "config.json").read_text())) == model.config
    params = load_hf(folder, split(Gemma4(model.config, model.dtype))[1])
    return dataclasses.replace(model, params={"target": params, "draft": ()})


def logits(model: Toy, ids, chunk: int) -> np.ndarray:
    return model.feed(model.bank(1), [ids], chunk)[1][0]


@pytest.mark.parametrize("form", ["nested", "flat"])
@pytest.mark.parametrize("name", SIZES)
def test_float32_logits_agree_through_four_turns_of_the_ring(torch_model, tmp_path, name, form):
    config = CONFIGS[name]
    write_checkpoint(tmp_path, config, make_weights(config), form=form)
    ids = make_ids(config, LENGTH)
    want = torch_model.logits(torch_model.load(tmp_path), ids)
    if config["enable_moe_block"]:
        # No choice of an expert is so close that rounding could turn it.
        reference = compiled(name, jnp.float32).reference
        reference.hidden(ids)
        assert reference.router_gap() > 5e-5
    model = load(name, tmp_path, jnp.float32)
    # by long chunks that read the ring and themselves, and by blocks written in place
    for chunk in (40, MAX_ROWS):
        assert np.abs(logits(model, ids, chunk) - want).max() < 1e-4


@pytest.mark.parametrize("name", SIZES)
def test_bfloat16_errs_no_more_than_transformers_does(torch_model, tmp_path, name):
    # given errors pooled over a few models and texts: the maximum of one alone is a dice throw
    config, ours, theirs = CONFIGS[name], [], []
    for seed in range(4):
        folder = tmp_path / str(seed)
        write_checkpoint(folder, config, make_weights(config, seed, bfloat16, calm=True))
        ids = make_ids(config, LENGTH, seed)
        exact = torch_model.logits(torch_model.load(folder, "float32"), ids)
        rounded = torch_model.logits(torch_model.load(folder, "bfloat16"), ids)
        got = logits(load(name, folder, jnp.bfloat16), ids, MAX_ROWS)
        ours.append(np.abs(got - exact))
        theirs.append(np.abs(rounded - exact))
        # then the best token is theirs wherever rounding cannot have changed it
        certain = top2_gap(exact) > 2 * theirs[-1].max()
        assert certain.sum() > LENGTH // 4
        assert (got.argmax(-1) == exact.argmax(-1))[certain].all()
    assert np.max(ours) <= 1.25 * np.max(theirs)
    assert np.mean(ours) <= 1.25 * np.mean(theirs)
