"""The plan command: its figures, its exit codes, and what it may not touch."""

import json

import huggingface_hub
import pytest

from carat_jax import plan
from tests.toys import CONFIGS, config_json, make_weights, write_checkpoint


def run(*arguments: str) -> int:
    return plan.main(["plan", *arguments])


def figures(capsys, *arguments: str) -> tuple[int, dict]:
    code = run("--json", *arguments)
    (line,) = capsys.readouterr().out.splitlines()
    return code, json.loads(line)


def test_table_and_json_say_the_same(capsys):
    options = ("--set=model=random:e2b", "--device_memory_gib=14", "--batches=1,8")
    code, found = figures(capsys, *options)
    assert code == 0
    assert found["limit"] == 14 * 2**30
    assert found["total"] == sum(found["bytes"].values())
    assert found["largest_context"]["1"] == found["model_limit"] == 131_072
    context = found["largest_context"]["8"]
    assert 8192 < context < 131_072
    assert run(*options) == 0
    text = capsys.readouterr().out
    assert f"{found['bytes']['weights'] / 2**30:.2f} GiB" in text
    assert "14.00 GiB  fits" in text
    assert f"{context:,}\n" in text
    # and what the table names fits, and one more does not
    for more, fits in ((0, True), (1, False)):
        sizes = ("--set=engine.max_batch=8", f"--set=engine.max_context={context + more}")
        code, found = figures(capsys, *options, "--batches=1", *sizes)
        assert (code, found["fits"]) == (int(not fits), fits)


def test_a_device_that_does_not_say_is_planned_without(capsys, monkeypatch):
    monkeypatch.setattr(plan, "device_limit", lambda: None)
    code, found = figures(capsys, "--config=configs/tiny.yaml")
    assert (code, found["limit"], found["fits"], found["largest_context"]) == (0, None, None, {})
    assert run("--config=configs/tiny.yaml") == 0
    text = capsys.readouterr().out
    assert "this cpu does not say how much it holds; give --device_memory_gib" in text
    assert "largest context" not in text


def test_a_machine_without_a_gpu_is_planned_by_its_memory(capsys, monkeypatch):
    monkeypatch.setattr(plan, "device_limit", lambda: 24 * 2**30)
    assert run("--config=configs/tiny.yaml") == 0
    assert "this cpu " in (text := capsys.readouterr().out)
    assert "24.00 GiB  fits" in text
    code, found = figures(capsys, "--config=configs/random-31b.yaml")
    assert (code, found["device"], found["fits"]) == (1, "this cpu", False)
    assert run("--config=configs/random-31b.yaml", "--device_memory_gib=100") == 0
    assert "a GPU " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set=engine.max_batch=0"], "--set: engine.max_batch"),
        (["--set=model=random:7b"], "random:7b"),
        (["--set=engine.max_context=5000"], "above the model's own limit of 4096"),
        (["--set=model=no/where/at/all"], "no such folder"),
        (["--batches=1,x"], "--batches: 'x'"),
        (["--batchs=1"], "Unknown command line flag"),
        (["--device_memory_gib=-1"], "device_memory_gib"),
        (["31b"], "'31b' is not a flag"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert message in err


def test_a_hub_name_is_planned_from_small_files(capsys, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(CONFIGS["31b"])))
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    code, found = figures(capsys, "--set=model=google/gemma-4-toy", "--set=engine.max_context=96")
    assert (code, found["bytes"]["weights"] > 0) == (0, True)
    assert asked == [("google/gemma-4-toy", ["*.json", "*.jinja"])]


def test_headers_of_a_folder_are_held_against_its_config(capsys, tmp_path):
    weights = make_weights(CONFIGS["T4"])
    whole = write_checkpoint(tmp_path / "whole", CONFIGS["T4"], weights)
    settings = ("--set=dtype=float32", "--set=engine.max_context=96")
    code, found = figures(capsys, f"--set=model={whole}", *settings)
    stored = sum(tensor.nbytes for tensor in weights.values())
    assert (code, found["bytes"]["weights"]) == (0, stored)
    del weights["norm.weight"]
    partial = write_checkpoint(tmp_path / "partial", CONFIGS["T4"], weights)
    assert run(f"--set=model={partial}", *settings) == 2
    assert "missing tensors: " in capsys.readouterr().err


def test_the_compilers_own_figures_stay_below_the_estimate(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(CONFIGS["T4"])))
    settings = ("engine.max_context=96", "engine.prefill_chunks=[32]", "dtype=float32")
    options = [f"--set=model={tmp_path}", *(f"--set={text}" for text in settings)]
    found = figures(capsys, "--measure", *options)[1]
    measured = found["measured"]
    assert list(measured) == ["prefill 32", "score 32", "round drawn with logprobs"]
    assert 0 < min(measured.values()) <= max(measured.values()) <= found["bytes"]["workspace"]
    assert run("--measure", "--device_memory_gib=80", *options) == 2
    assert "--measure" in capsys.readouterr().err
