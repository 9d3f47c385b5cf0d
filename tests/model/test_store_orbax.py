"""The converted form: the same bits back, and no altered file goes unnoticed."""

import json
import logging
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from carat_jax.model import store_orbax
from carat_jax.model.checkpoint import generation_config, load_params, read_config
from carat_jax.model.store_orbax import MANIFEST, PARAMS, is_orbax, save
from tests.model.published import assert_same_bits, expected, random_bits, specs_of
from tests.toys import CONFIGS, write_checkpoint


def converted(folder, name="T4", dtype="bfloat16"):
    """A converted toy of random bits; also its tensors and its source."""
    bits = {"bfloat16": np.uint16, "float32": np.uint32}[dtype]
    weights = random_bits(CONFIGS[name], dtype=bits)
    source = write_checkpoint(folder / "source", CONFIGS[name], weights, num_shards=2)
    (source / "chat_template.jinja").write_text("{{ bos_token }}")
    save(folder / "converted", load_params(source, specs_of(source, dtype)), source)
    return folder / "converted", weights, source


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("orbax"))[0]


@pytest.fixture
def copied(original, tmp_path):
    """A fresh copy of one converted toy, to be damaged."""
    return shutil.copytree(original, tmp_path / "copy")


def refusal(folder, specs) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (callers look at the text)
        load_params(folder, specs)
    return str(caught.value)


# ---- what comes back -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["T4", "T4e", "26b"])
def test_every_bit_and_every_small_file_comes_back(tmp_path, name, dtype):
    folder, weights, source = converted(tmp_path, name, dtype)
    assert is_orbax(folder)
    assert not is_orbax(source)
    specs = specs_of(folder, dtype)
    params = load_params(folder, specs)
    assert_same_bits(params, expected(CONFIGS[name], weights))
    assert jax.tree.structure(params) == jax.tree.structure(specs)
    assert read_config(folder) == read_config(source)
    assert generation_config(folder) == generation_config(source)
    assert (folder / "chat_template.jinja").read_text() == "{{ bos_token }}"
    assert not list(folder.glob("*safetensors*"))


def test_a_converted_folder_can_move(original, tmp_path):
    weights = random_bits(CONFIGS["T4"])
    moved = shutil.copytree(original, tmp_path / "elsewhere")
    assert_same_bits(load_params(moved, specs_of(moved)), expected(CONFIGS["T4"], weights))


def test_bfloat16_widens_and_float32_is_not_rounded(tmp_path):
    folder, weights, _ = converted(tmp_path)
    wide = {
        name: (tensor.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        for name, tensor in weights.items()
    }
    # a NaN may change its payload on its way through a conversion
    params = jax.tree.map(np.nan_to_num, load_params(folder, specs_of(folder, "float32")))
    wanted = expected(CONFIGS["T4"], {name: np.nan_to_num(x) for name, x in wide.items()})
    assert_same_bits(params, wanted)
    folder, _, _ = converted(tmp_path / "wide", dtype="float32")
    text = refusal(folder, specs_of(folder))
    assert "norm.weight: stored as float32, which bfloat16 would round" in text


def test_restoring_is_silent_and_says_its_speed(original, capfd, caplog):
    with caplog.at_level(logging.INFO, logger=store_orbax.__name__):
        load_params(original, specs_of(original))
    assert capfd.readouterr() == ("", "")
    lines = [r.getMessage() for r in caplog.records if r.name == store_orbax.__name__]
    assert len(lines) == 1
    assert lines[0].startswith(f"{original}: checked and read 0.00")


# ---- what is refused -------------------------------------------------------------------------


def sealed_files(folder):
    return sorted(f for f in folder.rglob("*") if f.is_file() and f != folder / MANIFEST)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_no_file_can_change(copied, damage):
    specs = specs_of(copied)
    files = sealed_files(copied)
    assert len(files) > 8
    for file in files:
        data = file.read_bytes()
        if damage == "remove":
            file.unlink()
        elif damage == "cut":
            file.write_bytes(data[:-1])
        else:
            middle = len(data) // 2
            file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        if data and file.name != "config.json":  # a broken config.json is refused before
            kind = "missing" if damage == "remove" else "altered"
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                store_orbax.restore(copied, specs)
            assert str(caught.value) == f"{copied}: {file.relative_to(copied)}: {kind}"
        file.write_bytes(data)
    store_orbax.restore(copied, specs)  # all is well again


def test_all_damaged_files_are_listed(copied):
    specs = specs_of(copied)
    (copied / "chat_template.jinja").write_text("")
    (copied / "generation_config.json").unlink()
    (copied / PARAMS / "stranger").write_text("")
    assert sorted(refusal(copied, specs).splitlines()) == [
        "  chat_template.jinja: altered",
        "  generation_config.json: missing",
        f"  {PARAMS}/stranger: not in {MANIFEST}",
        f"{copied}: 3 problems:",
    ]


def test_notes_beside_the_parameters_are_allowed(copied):
    before = load_params(copied, specs_of(copied))
    (copied / "README.md").write_text("mine")
    after = load_params(copied, specs_of(copied))
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_the_manifest_is_sealed_too(copied):
    specs = specs_of(copied)
    content = json.loads((copied / MANIFEST).read_text())
    del content["files"]["chat_template.jinja"]
    (copied / MANIFEST).write_text(json.dumps(content))
    assert refusal(copied, specs).startswith(f"{copied}: {MANIFEST} was altered")
    (copied / MANIFEST).write_text(json.dumps(content)[:-5])
    assert f"{MANIFEST}: not readable as JSON" in refusal(copied, specs)
    (copied / MANIFEST).unlink()
    assert refusal(copied, specs).startswith(f"{copied}: {MANIFEST} is missing")


def test_another_version_is_refused(copied):
    content = json.loads((copied / MANIFEST).read_text())
    (copied / MANIFEST).write_text(json.dumps(content | {"format": "carat-jax-orbax-9"}))
    assert "has format 'carat-jax-orbax-9', this version reads 'carat-jax-orbax-1'" in refusal(
        copied, specs_of(copied)
    )


def test_another_models_parameters_are_listed(original, tmp_path):
    config = CONFIGS["T4"] | {"intermediate_size": 96, "attention_k_eq_v": False}
    config |= {"num_hidden_layers": 3, "layer_types": config["layer_types"][:3]}
    other = write_checkpoint(tmp_path, config, random_bits(config))
    text = refusal(original, specs_of(other))
    assert "unknown parameter: layers.5.layer_scalar" in text
    assert "layers.0.mlp.down_proj: shape [128, 64], not [96, 64]" in text
    assert "layers.2.self_attn.qkv_proj: shape [64, 1, 5, 32], not [64, 2, 4, 32]" in text
    text = refusal(original, specs_of(original) | {"extra": specs_of(original)["norm"]})
    assert text == f"{original}: missing parameter: extra.weight"


# ---- writing ---------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, original):
    params = load_params(original, specs_of(original))
    (tmp_path / "note").write_text("mine")
    for target in (tmp_path, tmp_path / "note"):
        with pytest.raises(ValueError, match="exists and is not an empty folder; nothing was writ"):
            save(target, params, original)
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def test_an_empty_folder_is_filled_and_parents_are_made(tmp_path, original):
    params = load_params(original, specs_of(original))
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        save(target, params, original)
        assert_same_bits(
            load_params(target, specs_of(target)),
            expected(CONFIGS["T4"], random_bits(CONFIGS["T4"])),
        )


def test_a_failed_write_leaves_nothing(tmp_path, original, monkeypatch):
    params = load_params(original, specs_of(original))

    def fail(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(ocp.Checkpointer, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        save(tmp_path / "new", params, original)
    assert list(tmp_path.iterdir()) == []
