"""Loading published checkpoints: every bit in its place, one head, and no second copy in memory."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from carat_jax.model import load_hf as loading
from carat_jax.model.checkpoint import load_params
from carat_jax.model.load_hf import load_hf, stored_dtype
from carat_jax.numerics.sharding import sharding
from tests.model.published import (
    PUBLISHED,
    assert_same_bits,
    expected,
    load,
    random_bits,
    refusal,
    specs_of,
    t4,
)
from tests.toys import CONFIGS, save_safetensors, tensor_shapes, write_checkpoint

# ---- what arrives ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_bfloat16_bit_arrives_in_its_place(tmp_path, name, num_shards):
    config = CONFIGS[name]
    weights = random_bits(config)
    folder = write_checkpoint(tmp_path, config, weights, num_shards=num_shards)
    assert_same_bits(load(folder), expected(config, weights))


@pytest.mark.parametrize("name", ["T4", "T4e"])
def test_every_float32_bit_arrives_in_its_place(tmp_path, name):
    config = CONFIGS[name]
    weights = random_bits(config, dtype=np.uint32)
    folder = write_checkpoint(tmp_path, config, weights)
    assert stored_dtype(folder) == "float32"
    assert_same_bits(load(folder, "float32"), expected(config, weights))


def test_bfloat16_widens_to_float32_exactly(tmp_path):
    rng = np.random.default_rng(1)
    weights = {
        name: (rng.normal(size=shape) * 2.0 ** rng.integers(-120, 120, shape)).astype("bfloat16")
        for name, shape in tensor_shapes(CONFIGS["T4e"]).items()
    }
    folder = write_checkpoint(tmp_path, CONFIGS["T4e"], weights)
    # a float32 is a bfloat16 followed by sixteen zero bits
    wide = {
        name: (tensor.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        for name, tensor in weights.items()
    }
    assert_same_bits(load(folder, "float32"), expected(CONFIGS["T4e"], wide))


def test_float32_becomes_bfloat16_only_on_request(tmp_path):
    weights = random_bits(CONFIGS["T4"], dtype=np.uint32)
    weights = {name: np.nan_to_num(tensor) for name, tensor in weights.items()}
    folder = t4(tmp_path, weights)
    specs = specs_of(folder)
    with pytest.raises(ValueError, match=r"stored as F32, which bfloat16 would round.*norm\.weigh"):
        load_hf(folder, specs)
    rounded = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in weights.items()}
    found = load_hf(folder, specs, allow_rounding=True)
    assert_same_bits(found, expected(CONFIGS["T4"], rounded))


@pytest.mark.parametrize("form", ["nested", "flat", "resaved", "resaved_flat"])
def test_every_form_of_config_gives_the_same_model(tmp_path, form):
    weights = random_bits(CONFIGS["T4"])
    assert_same_bits(load(t4(tmp_path, weights, form=form)), expected(CONFIGS["T4"], weights))


TOWERS = {
    "vision_tower.encoder.layers.0.mlp.down_proj.weight": np.ones((2, 3), ml_dtypes.bfloat16),
    "vision_tower.patch_embedder.input_max": np.float32(3.0),
    "vision_embedder.patch_dense.weight": np.ones((2, 3), np.float16),
    "embed_vision.embedding_projection.weight": np.ones((2, 3), ml_dtypes.float8_e4m3fn),
    "audio_tower.conformer.0.attention.q_proj.input_min": np.array(-3.0, ml_dtypes.bfloat16),
    "embed_audio.embedding_projection.weight": np.ones((2, 3), np.uint8),
}


@pytest.mark.parametrize("towers_prefix", ["", "model."])
@pytest.mark.parametrize("prefix", [PUBLISHED, "language_model.model.", "model.", ""])
def test_every_prefix_is_found_and_towers_are_skipped(tmp_path, prefix, towers_prefix):
    weights = random_bits(CONFIGS["T4"])
    towers = {towers_prefix + name: np.asarray(tensor) for name, tensor in TOWERS.items()}
    folder = t4(tmp_path, weights, prefix=prefix, extra_tensors=towers)
    assert_same_bits(load(folder), expected(CONFIGS["T4"], weights))


def test_projections_of_borrowing_layers_may_be_there(tmp_path):
    config = CONFIGS["T4e"]
    weights = random_bits(config)
    extra = {
        f"{PUBLISHED}layers.{i}.self_attn.{name}.weight": np.ones((3, 3), ml_dtypes.bfloat16)
        for i in (4, 5)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    folder = write_checkpoint(tmp_path, config, weights, extra_tensors=extra)
    assert_same_bits(load(folder), expected(config, weights))


@pytest.mark.parametrize("stray", ["model.safetensors", "model-00002.safetensors", "a.safetensors"])
def test_a_file_that_the_index_does_not_name_is_not_opened(tmp_path, stray):
    weights = random_bits(CONFIGS["T4"])
    folder = t4(tmp_path, weights, num_shards=3)
    others = random_bits(CONFIGS["T4"], seed=9)
    save_safetensors(folder / stray, {PUBLISHED + n: tensor for n, tensor in others.items()})
    assert_same_bits(load(folder), expected(CONFIGS["T4"], weights))


def test_parameters_go_where_the_table_says(tmp_path):
    config = CONFIGS["T4"]
    weights = random_bits(config)
    folder = t4(tmp_path, weights)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    specs = specs_of(folder)
    params = load_params(
        folder, specs, placement=lambda spec: sharding(mesh, spec.axes, spec.shape)
    )
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        assert leaf.sharding == sharding(mesh, spec.axes, spec.shape)
    # two KV heads and two halves of the MLP: one each
    shard = params["layers"][0]["self_attn"]["qkv_proj"].addressable_shards[1].data
    assert shard.shape[1] == 2 // mesh.size
    assert_same_bits(params, expected(config, weights))


def test_loading_is_silent_and_says_its_speed(tmp_path, capfd, caplog):
    folder = t4(tmp_path)
    with caplog.at_level(logging.INFO, logger=loading.__name__):
        load(folder)
    assert capfd.readouterr() == ("", "")
    num_bytes = sum(2 * np.prod(shape) for shape in tensor_shapes(CONFIGS["T4"]).values())
    (line,) = [record.getMessage() for record in caplog.records]
    found = re.fullmatch(rf"{folder}: read (\S+) GB in (\S+) s \((\S+) GB/s\)", line)
    assert float(found[1]) == pytest.approx(num_bytes / 1e9, abs=6e-4)


# ---- the head --------------------------------------------------------------------------------


def with_head(folder, is_tied, head):
    config = CONFIGS["T4"] | {"tie_word_embeddings": is_tied}
    weights = random_bits(config)
    if head == "other":
        weights["lm_head.weight"] = random_bits(config, seed=5)["embed_tokens.weight"]
    elif head == "same":
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    return write_checkpoint(folder, config, weights), config, weights


@pytest.mark.parametrize(
    ("is_tied", "head"), [(True, None), (True, "same"), (False, "same"), (True, "other")]
)
def test_the_head_is_the_embedding(tmp_path, caplog, is_tied, head):
    folder, config, weights = with_head(tmp_path, is_tied, head)
    assert_same_bits(load(folder), expected(config, weights))
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == (head == "other")
    if warnings:
        assert "lm_head.weight differs from the embedding" in warnings[0]
        assert "the embedding is used" in warnings[0]


@pytest.mark.parametrize(
    ("head", "words"), [("other", "has lm_head.weight"), (None, "has no lm_head.weight")]
)
def test_a_head_of_its_own_is_refused(tmp_path, head, words):
    folder, _, _ = with_head(tmp_path, False, head)
    text = refusal(folder)
    assert "tie_word_embeddings is false" in text
    assert words in text


# ---- memory ----------------------------------------------------------------------------------

_MEASURE = """
import json, resource, sys, pathlib
import jax, numpy as np
from carat_jax.model.checkpoint import load_params, read_config
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import num_bytes, split

folder = pathlib.Path(sys.argv[1])
specs = split(Gemma4(read_config(folder)[0], "bfloat16"))[1]
jax.device_put(np.ones(3)).block_until_ready()
live, put = [], jax.device_put
def counting_put(*args, **kwargs):
    array = put(*args, **kwargs)
    live.append(sum(a.nbytes for a in jax.live_arrays()))
    return array
jax.device_put = counting_put
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
params = load_params(folder, specs)
print(json.dumps({"growth": peak() - before, "weights": num_bytes(specs), "live": max(live)}))
"""


def test_neither_host_nor_device_holds_the_model_twice(tmp_path):
    """Host memory is the device here, so what may grow beside the weights is two shards."""
    hidden = 640
    config = CONFIGS["31b"] | {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "head_dim": hidden // 8,
        "global_head_dim": hidden // 4,
        "num_hidden_layers": 24,
        "layer_types": CONFIGS["31b"]["layer_types"] * 2,
        "vocab_size": 8192,
    }
    block = np.random.default_rng(0).integers(0, 2**15, 8192 * hidden, np.uint16)
    weights = {
        name: block[: np.prod(shape)].reshape(shape).view(ml_dtypes.bfloat16)
        for name, shape in tensor_shapes(config).items()
    }
    folder = write_checkpoint(tmp_path, config, weights, num_shards=3)
    shard = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    command = [sys.executable, "-c", _MEASURE, str(folder)]
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    found = json.loads(out.stdout)
    assert found["weights"] > 250e6
    assert found["growth"] - found["weights"] < 2 * shard
    assert found["live"] <= found["weights"] + 100  # the warm-up's array
