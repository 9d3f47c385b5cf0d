"""The convert command: what it writes loads to the same model, what it refuses is one line."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from carat_jax import convert
from carat_jax.model.checkpoint import TINY, load_params
from carat_jax.model.store_orbax import is_orbax
from tests.model.published import assert_same_bits, expected, flat, random_bits, specs_of
from tests.toys import CONFIGS, write_checkpoint


def run(*arguments) -> int:
    return convert.main(["convert", *map(str, arguments)])


def source_of(folder, bits=np.uint16, **options):
    weights = random_bits(CONFIGS["T4e"], dtype=bits)
    write_checkpoint(folder / "source", CONFIGS["T4e"], weights, **options)
    return folder / "source", weights


@pytest.mark.parametrize(("bits", "dtype"), [(np.uint16, "bfloat16"), (np.uint32, "float32")])
def test_the_type_is_kept(tmp_path, capfd, bits, dtype):
    source, weights = source_of(tmp_path, bits, num_shards=3)
    assert run(source, tmp_path / "out") == 0
    assert capfd.readouterr() == ("", "")
    params = load_params(tmp_path / "out", specs_of(tmp_path / "out", dtype))
    assert_same_bits(params, expected(CONFIGS["T4e"], weights))


def test_rounding_is_asked_for_by_type(tmp_path):
    weights = random_bits(CONFIGS["T4e"], dtype=np.uint32)
    weights = {name: np.nan_to_num(tensor) for name, tensor in weights.items()}
    source = write_checkpoint(tmp_path / "source", CONFIGS["T4e"], weights)
    assert run("--dtype=bfloat16", source, tmp_path / "out") == 0
    params = load_params(tmp_path / "out", specs_of(tmp_path / "out"))
    rounded = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in weights.items()}
    assert_same_bits(params, expected(CONFIGS["T4e"], rounded))


@pytest.mark.skipif(not (TINY / "config.json").is_file(), reason="no embedded model")
def test_the_embedded_model_converts(tmp_path):
    assert run("tiny", tmp_path / "out") == 0
    published = flat(load_params(TINY, specs_of(TINY)))
    assert_same_bits(load_params(tmp_path / "out", specs_of(TINY)), published)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (TINY / name).read_bytes()


def line_of(capfd) -> str:
    out, err = capfd.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert "Traceback" not in err
    return err.removesuffix("\n")


def test_each_refusal_is_one_line(tmp_path, capfd, monkeypatch):
    source, _ = source_of(tmp_path)
    full, out = tmp_path / "full", tmp_path / "out"
    full.mkdir()
    (full / "note").write_text("mine")
    usage = "usage: python -m carat_jax.convert SRC DST [--dtype bfloat16|float32]"
    for arguments, words in [
        ((), f"0 arguments, not 2; {usage}"),
        ((source,), f"1 arguments, not 2; {usage}"),
        ((source, out, "more"), f"3 arguments, not 2; {usage}"),
        ((source, out, "--dtype", "int8"), "--dtype=int8: value should be one of"),
        ((source, out, "--shards=3"), "Unknown command line flag 'shards'"),
        (("nowhere", out), "model: nowhere: no such folder, and not a hub name"),
        ((source / "config.json", out), "is a file; give the folder"),
        ((source, full), f"{full}: exists and is not an empty folder; nothing was written"),
        ((source, source), f"{source}: exists and is not an empty folder; nothing was written"),
        ((full, out), f"{full}: no config.json"),
    ]:
        assert run(*arguments) == 2, arguments
        line = line_of(capfd)
        assert line.startswith("convert: ")
        assert "\n" not in line
        assert words in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "source"]
    assert (full / "note").read_text() == "mine"


def test_damage_in_the_source_is_told_before_writing(tmp_path, capfd):
    source, _ = source_of(tmp_path, num_shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    assert run(source, tmp_path / "out") == 2
    assert "model-00002-of-00003.safetensors: missing" in line_of(capfd)
    assert not (tmp_path / "out").exists()


def test_a_converted_folder_is_not_converted_again(tmp_path, capfd):
    source, _ = source_of(tmp_path)
    assert run(source, tmp_path / "once") == 0
    assert is_orbax(tmp_path / "once")
    assert run(tmp_path / "once", tmp_path / "twice") == 2
    assert line_of(capfd) == f"convert: {tmp_path / 'once'}: is a converted checkpoint already"


def test_a_mixture_without_its_experts_is_refused(tmp_path, capfd):
    config = CONFIGS["T4"] | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    config["moe_intermediate_size"] = 16
    source = write_checkpoint(tmp_path / "source", config, random_bits(CONFIGS["T4"]))
    assert run(source, tmp_path / "out") == 2
    line = line_of(capfd)
    assert "missing tensors: " in line
    assert "layers.0.experts.down_proj" in line


def test_help_and_the_module_as_a_command(tmp_path, capfd):
    assert run("--help") == 0
    assert "SRC DST" in capfd.readouterr().out
    command = [sys.executable, "-m", "carat_jax.convert", str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"convert: {tmp_path}: no config.json; is this the folder of a checkpoint?\n"
    )
