"""The command in a process of its own, with the embedded model and a real Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import carat_jax
from tests.generate.scripted_loop import records_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "carat_jax" / "tiny" / "model.safetensors"


def command(*arguments, **kwargs) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "carat_jax.generate", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_refusals_in_a_process_come_before_jax_is_loaded():
    started = time.monotonic()
    process = command("--config=configs/tiny.yaml", "--prompts=a")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: Unknown command line flag 'prompts'. Did you mean: prompt")
    assert len(err.splitlines()) == 1
    assert time.monotonic() - started < 30


@pytest.mark.skipif(not TINY.exists(), reason="the embedded model is not there")
def test_the_embedded_model_writes_from_the_command_line():
    arguments = ["--config=configs/tiny.yaml", "--prompt=Once upon a time"]
    process = command(*arguments, "--set=sampling.max_tokens=12")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    expected = carat_jax.load("tiny", dtype="float32").generate(
        "Once upon a time", temperature=0, max_tokens=12
    )
    assert out.rstrip("\n") == expected.text.rstrip("\n")
    assert "1 prompt, " in err


@pytest.mark.skipif(not TINY.exists(), reason="the embedded model is not there")
def test_a_real_interrupt_leaves_finished_records(tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(
        '{"prompt": "The fox", "max_tokens": 3}\n'
        '{"prompt": "Anna", "max_tokens": 3500, "ignore_eos": true}\n'
    )
    process = command(
        "--config=configs/tiny.yaml", f"--prompt_file={prompts}", f"--output={output}"
    )
    deadline = time.monotonic() + 240
    while not (output.exists() and output.read_text()) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    first, second = records_of(output)
    assert (first["prompt"], len(first["ids"]), first["finish_reason"]) == ("The fox", 3, "length")
    assert (second["prompt"], second["finish_reason"]) == ("Anna", "cancelled")
    assert 0 < len(second["ids"]) < 3500
