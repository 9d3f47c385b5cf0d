"""Loading published checkpoints: every bit in its place, and every fault named before placement."""

import json
import logging
import re
import struct
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from carat_jax.model import load_hf as loading
from carat_jax.model.checkpoint import load_params, read_config
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.load_hf import load_hf, stored_dtype
from carat_jax.model.params import split
from carat_jax.numerics.sharding import sharding
from tests.toys import CONFIGS, save_safetensors, tensor_shapes, write_checkpoint

PUBLISHED = "model.language_model."


def random_bits(config, seed=0, dtype=np.uint16):
    """Tensors of arbitrary bits: NaNs with payloads, infinities, subnormals, both zeros."""
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == np.uint16 else np.float32
    return {
        name: rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True).view(kind)
        for name, shape in tensor_shapes(config).items()
    }


def specs_of(folder: Path, dtype="bfloat16"):
    return split(Gemma4(read_config(folder)[0], dtype))[1]


def load(folder: Path, dtype="bfloat16"):
    return load_params(folder, specs_of(folder, dtype))


def expected_layer(config, weights, i):
    """A layer's parameters, written out per element group and not through `TensorSource`."""

    def tensor(name):
        return weights[f"layers.{i}.{name}"]

    is_sliding = config["layer_types"][i] == "sliding_attention"
    k_eq_v = config["attention_k_eq_v"] and not is_sliding
    num_kv = config["num_global_key_value_heads" if k_eq_v else "num_key_value_heads"]
    dim = config["head_dim" if is_sliding else "global_head_dim"]
    group = config["num_attention_heads"] // num_kv
    q, o = tensor("self_attn.q_proj.weight"), tensor("self_attn.o_proj.weight")
    heads = [q[h * dim : (h + 1) * dim].T for h in range(num_kv * group)]
    owns = i < config["num_hidden_layers"] - config["num_kv_shared_layers"]
    rows = []
    for k in range(num_kv):
        row = heads[k * group : (k + 1) * group]
        for part in ("k_proj", "v_proj")[: (0 if not owns else 1 if k_eq_v else 2)]:
            row.append(tensor(f"self_attn.{part}.weight")[k * dim : (k + 1) * dim].T)
        rows.append(np.stack(row, axis=1))
    gate, up = tensor("mlp.gate_proj.weight"), tensor("mlp.up_proj.weight")
    params = {
        "self_attn.qkv_proj": np.stack(rows, axis=1),
        "self_attn.o_proj": o.T.reshape(num_kv, group, dim, -1),
        "self_attn.q_norm.weight": tensor("self_attn.q_norm.weight"),
        "mlp.gate_up_proj": np.stack([gate.T, up.T], axis=1),
        "mlp.down_proj": tensor("mlp.down_proj.weight").T,
        "layer_scalar": tensor("layer_scalar"),
    }
    if owns:
        params["self_attn.k_norm.weight"] = tensor("self_attn.k_norm.weight")
    for side in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        params[f"{side}_layernorm.weight"] = tensor(f"{side}_layernorm.weight")
    if config["enable_moe_block"]:
        packed = tensor("experts.gate_up_proj")
        params["experts.gate_up_proj"] = np.stack(np.split(packed, 2, axis=1), axis=1)
        params["experts.down_proj"] = tensor("experts.down_proj")
        params["router.proj"] = tensor("router.proj.weight")
        for name in (
            *("router.scale", "router.per_expert_scale"),
            *("pre_feedforward_layernorm_2.weight", "post_feedforward_layernorm_1.weight"),
            "post_feedforward_layernorm_2.weight",
        ):
            params[name] = tensor(name)
    if config["hidden_size_per_layer_input"]:
        params["per_layer_input.gate"] = tensor("per_layer_input_gate.weight").T
        params["per_layer_input.projection"] = tensor("per_layer_projection.weight").T
        params["per_layer_input.norm.weight"] = tensor("post_per_layer_input_norm.weight")
    return {f"layers.{i}.{name}": array for name, array in params.items()}


def expected(config, weights):
    params = {"embed_tokens": weights["embed_tokens.weight"], "norm.weight": weights["norm.weight"]}
    for i in range(config["num_hidden_layers"]):
        params |= expected_layer(config, weights, i)
    if config["hidden_size_per_layer_input"]:
        ple = "per_layer_embedding."
        params[ple + "embed_tokens_per_layer"] = weights["embed_tokens_per_layer.weight"]
        projection = weights["per_layer_model_projection.weight"]
        params[ple + "per_layer_model_projection"] = projection.T
        norm = weights["per_layer_projection_norm.weight"]
        params[ple + "per_layer_projection_norm.weight"] = norm
    return params


def flat(params):
    leaves = jax.tree.leaves_with_path(params)
    return {".".join(str(k.key) for k in path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_bits(params, wanted):
    found = flat(params)
    assert sorted(found) == sorted(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.fixture
def nothing_placed(monkeypatch):
    """Makes reading a tensor or touching a device an error: only headers may be read."""

    def refuse(*_, **__):
        raise AssertionError("data was touched before the checks were done")

    monkeypatch.setattr(jax, "device_put", refuse)
    monkeypatch.setattr(np, "memmap", refuse)


def refusal(folder, dtype="bfloat16") -> str:
    specs = specs_of(folder, dtype)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (callers look at the text)
        load_params(folder, specs)
    return str(caught.value)


def t4(folder, weights=None, **options):
    config = CONFIGS["T4"]
    return write_checkpoint(folder, config, weights or random_bits(config), **options)


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


# ---- what is refused -------------------------------------------------------------------------


def test_all_faults_are_listed_at_once_before_anything_is_placed(tmp_path, nothing_placed):
    weights = random_bits(CONFIGS["T4"])
    weights["layers.0.input_layernorm_.weight"] = weights.pop("layers.0.input_layernorm.weight")
    del weights["layers.5.layer_scalar"]
    weights["layers.1.mlp.up_proj.weight"] = weights["layers.1.mlp.up_proj.weight"].T
    weights["layers.2.mlp.down_proj.weight"] = np.ones((64, 128), np.int8)
    weights["layers.3.mlp.down_proj.weight"] = np.ones((64, 128), ml_dtypes.float8_e4m3fn)
    weights["norm.weight"] = weights["norm.weight"].astype(np.float32)
    folder = t4(tmp_path, weights)
    names = [line.strip() for line in refusal(folder).splitlines()]
    p = PUBLISHED
    cannot = "which is neither BF16 nor F32 (quantised and float16 checkpoints are not supported)"
    assert names[0] == f"{folder}: 6 problems:"
    assert sorted(names[1:]) == sorted(
        [
            f"missing tensors: {p}layers.0.input_layernorm.weight, {p}layers.5.layer_scalar",
            f"unknown text tensors: {p}layers.0.input_layernorm_.weight",
            f"{p}layers.1.mlp.up_proj.weight: shape (64, 128), not (128, 64)",
            f"stored as I8, {cannot}: {p}layers.2.mlp.down_proj.weight",
            f"stored as F8_E4M3, {cannot}: {p}layers.3.mlp.down_proj.weight",
            "stored as F32, which bfloat16 would round (set dtype: float32, or convert the "
            f"checkpoint with --dtype bfloat16): {p}norm.weight",
        ]
    )


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("T4", "-layers.0.self_attn.v_proj.weight", "missing tensors: "),
        ("T4", "+layers.2.self_attn.v_proj.weight", "unknown text tensors: "),  # K = V there
        ("T4", "+layers.6.input_layernorm.weight", "unknown text tensors: "),
        ("T4", "+layers.0.self_attn.q_proj.weight_scale", "unknown text tensors: "),
        ("T4", "+layers.0.self_attn.q_proj.bias", "unknown text tensors: "),
        ("T4e", "-layers.3.self_attn.k_norm.weight", "missing tensors: "),
        ("T4e", "-embed_tokens_per_layer.weight", "missing tensors: "),
        ("T4", "+embed_tokens_per_layer.weight", "unknown text tensors: "),
    ],
)
def test_one_tensor_too_many_or_too_few(tmp_path, nothing_placed, name, change, words):
    weights = random_bits(CONFIGS[name])
    if change[0] == "-":
        del weights[change[1:]]
    else:
        weights[change[1:]] = np.ones((64,), ml_dtypes.bfloat16)
    folder = write_checkpoint(tmp_path, CONFIGS[name], weights)
    assert refusal(folder) == f"{folder}: {words}{PUBLISHED}{change[1:]}"


def test_a_name_with_another_prefix_is_not_taken_for_the_tensor(tmp_path, nothing_placed):
    weights = random_bits(CONFIGS["T4"])
    folder = t4(tmp_path, weights, extra_tensors={"norm.weight": weights["norm.weight"]})
    assert refusal(folder) == f"{folder}: unknown text tensors: norm.weight"


def test_a_packed_projection_is_refused(tmp_path, nothing_placed):
    weights = random_bits(CONFIGS["T4"])
    name = "layers.0.mlp.up_proj.weight"
    weights[name] = np.ones((128, 32), np.uint8)
    weights[name + "_scale"] = np.ones((128, 2), ml_dtypes.bfloat16)
    text = refusal(t4(tmp_path, weights))
    assert f"unknown text tensors: {PUBLISHED}{name}_scale" in text
    assert f"{name}: shape (128, 32), not (128, 64)" in text
    assert "stored as U8" in text


@pytest.mark.parametrize("kind", [np.float16, np.float64, np.int32, np.uint8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_types_that_would_be_cast_are_refused(tmp_path, nothing_placed, kind, dtype):
    weights = random_bits(CONFIGS["T4"])
    weights["norm.weight"] = np.ones(64, kind)
    text = refusal(t4(tmp_path, weights), dtype)
    assert re.search(r"stored as \S+, which is neither BF16 nor F32.*: \S+norm\.weight$", text)


def test_two_text_models_or_none(tmp_path, nothing_placed):
    weights = random_bits(CONFIGS["T4"])
    twice = {f"model.{name}": tensor for name, tensor in weights.items()}
    text = refusal(t4(tmp_path / "twice", weights, extra_tensors=twice))
    assert text.endswith(
        "two text models: model.embed_tokens.weight, model.language_model.embed_tokens.weight"
    )
    text = refusal(t4(tmp_path / "none", weights, prefix="transformer."))
    assert "no text model: none of " in text
    assert "model.language_model.embed_tokens.weight" in text


def test_a_missing_shard_is_named(tmp_path, nothing_placed):
    folder = t4(tmp_path, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert refusal(folder) == (
        f"{folder}: model-00002-of-00003.safetensors: missing; model.safetensors.index.json names "
        "it"
    )


def test_a_folder_without_weights(tmp_path, nothing_placed):
    folder = t4(tmp_path)
    (folder / "model.safetensors").unlink()
    assert refusal(folder).endswith(
        "no model.safetensors and no model.safetensors.index.json in this folder"
    )


def edit_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        ("norm.weight", SECOND, [f"norm.weight: in {FIRST}, but", f"{SECOND}: lacks tensors that"]),
        ("norm.weight", None, [f"norm.weight: in {FIRST}, but", "says no file"]),
        ("norm.bias", FIRST, [f"{FIRST}: lacks tensors that", "promises: ", "norm.bias"]),
        ("norm.weight", f"../{FIRST}", ["no weight_map from tensors to files of this folder"]),
        ("norm.weight", 7, ["no weight_map from tensors to files of this folder"]),
    ],
)
def test_an_index_that_disagrees_with_its_shards(tmp_path, nothing_placed, name, file, words):
    folder = t4(tmp_path, num_shards=2)

    def edit(weight_map):
        weight_map[PUBLISHED + name] = file
        if file is None:
            del weight_map[PUBLISHED + name]

    edit_index(folder, edit)
    text = refusal(folder)
    assert all(word in text for word in words), text
    assert "missing tensors" not in text  # said once, with the file


def test_a_tensor_in_two_shards(tmp_path, nothing_placed):
    weights = random_bits(CONFIGS["T4"])
    folder = t4(tmp_path, weights, num_shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    inside = {n: weights[n.removeprefix(PUBLISHED)] for n, f in index.items() if f == SECOND}
    twice = inside | {PUBLISHED + "norm.weight": weights["norm.weight"]}
    save_safetensors(folder / SECOND, twice)
    assert f"{PUBLISHED}norm.weight: both in {FIRST} and in {SECOND}" in refusal(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": []}', "{}"])
def test_a_damaged_index(tmp_path, nothing_placed, content):
    folder = t4(tmp_path, num_shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json: " in refusal(folder)


@pytest.mark.parametrize("size", [0, 7, 8, 100, -100_000, -1])
def test_a_truncated_file(tmp_path, nothing_placed, size):
    folder = t4(tmp_path, num_shards=2)
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:size])
    text = refusal(folder)
    assert re.match(rf"{folder}: {SECOND}: (truncated|not a safetensors file, or cut off)", text)
    if size == -1:  # the last tensor alone has lost a byte
        assert text.endswith(f"cut off: {PUBLISHED}layers.5.self_attn.k_norm.weight")


def rewrite_header(path, edit):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    text = edit(header) or json.dumps(header)
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + length :])


def moved(by):
    def edit(header):
        header[PUBLISHED + "norm.weight"]["data_offsets"][0] += by
        header[PUBLISHED + "norm.weight"]["data_offsets"][1] += by

    return edit


def entry_with(**fields):
    return lambda header: header[PUBLISHED + "norm.weight"].update(fields)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (moved(-4), "an overlap in data_offsets between .*embed_tokens.weight and .*norm.weight"),
        (moved(4), "a gap in data_offsets between .*embed_tokens.weight and .*norm.weight"),
        (moved(10**9), "truncated: .* cut off: .*norm.weight"),
        (moved(-(10**6)), "norm.weight: bad shape .* or data_offsets"),
        (entry_with(shape=[65]), r"norm.weight: data_offsets .* do not fit BF16 of shape \(65,\)"),
        (entry_with(shape=[True]), "norm.weight: bad shape"),
        (entry_with(shape=None), "norm.weight: "),
        (entry_with(data_offsets=[0]), "norm.weight: "),
        (entry_with(dtype="Q4_0"), "stored as Q4_0, which is neither BF16 nor F32"),
        (entry_with(more=1), "norm.weight: its header entry must have"),
        (lambda header: header.pop(PUBLISHED + "norm.weight") and None, "a gap in data_offsets"),
        (lambda header: json.dumps(header)[:-1] + ', "x": {}, "x": {}}', r"\['x'\] appear twice"),
        (lambda header: json.dumps(header)[:-1], "unreadable header"),
        (lambda header: "[1]", "unreadable header"),
    ],
)
def test_a_damaged_header(tmp_path, nothing_placed, edit, words):
    folder = t4(tmp_path)
    rewrite_header(folder / "model.safetensors", edit)
    assert re.search(words, refusal(folder)), refusal(folder)


def test_bytes_past_the_last_tensor(tmp_path, nothing_placed):
    folder = t4(tmp_path)
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"123")
    assert refusal(folder) == f"{folder}: model.safetensors: 3 bytes past the last tensor"


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
