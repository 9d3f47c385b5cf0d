"""The start-up benchmark: fresh processes, the second of which finds all it needs compiled."""

import json
import subprocess
import sys


def test_a_warm_start_reads_every_step_from_the_cache_and_says_the_same(tmp_path):
    rows = tmp_path / "startup.jsonl"
    sizes = ("engine.max_batch=1", "engine.max_context=64", "engine.prefill_chunks=[8]")
    done = subprocess.run(
        [sys.executable, "-m", "carat_jax.bench.startup", "--config=configs/tiny.yaml"]
        + [f"--set={text}" for text in sizes]
        + ["--prompt=7", "--warm=1", f"--output={rows}", "--commit=abc"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cold, warm = (json.loads(line) for line in rows.read_text().splitlines())
    assert (cold["case"], warm["case"]) == ("cold", "warm")
    # every program was compiled once and read once, none of them after it was first needed
    assert cold["compilations"] == warm["compilations"] == warm["from_compile_cache"] > 5
    assert cold["from_compile_cache"] < 3  # of the very same small program
    assert cold["compiled_late"] == warm["compiled_late"] == 0
    assert cold["token"] == warm["token"]
    for row in (cold, warm):
        phases = ("import_s", "load_s", "compile_s", "first_token_s")
        assert abs(sum(row[name] for name in phases) - row["seconds"]) < 0.01 * row["seconds"]
        assert 0 < row["plan_s"] + row["weights_s"] <= row["load_s"]
        assert (row["commit"], row["model"]) == ("abc", "tiny")
