"""Published checkpoints with faults: every one is named before anything is placed."""

import json
import re
import struct

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.model.published import PUBLISHED, random_bits, refusal, t4
from tests.toys import CONFIGS, save_safetensors, write_checkpoint


@pytest.fixture
def nothing_placed(monkeypatch):
    """Makes reading a tensor or touching a device an error: only headers may be read."""

    def refuse(*_, **__):
        raise AssertionError("data was touched before the checks were done")

    monkeypatch.setattr(jax, "device_put", refuse)
    monkeypatch.setattr(np, "memmap", refuse)


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
