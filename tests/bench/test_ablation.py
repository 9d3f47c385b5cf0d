"""Ablations: what a file asks for, what an interruption and a failure leave, and what rows say."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from carat_jax.bench import ablate, ablation_report
from carat_jax.bench.ablate import Bench, Rows
from carat_jax.bench.ablation_plan import Workload, read_plan
from carat_jax.bench.measure import Records
from carat_jax.engine.shapes import key_rungs
from carat_jax.numerics.padding import padded_keys

SHIPPED = sorted(Path("configs/ablations").glob("*.yaml"))
SHORT = {"prompt_tokens": 20, "new_tokens": 5, "rounds": 1}


def plan_of(tmp_path, text: str, overrides=(), backend: str = "cpu", **numbers):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    return read_plan(path, overrides, backend, numbers)


def refusal(tmp_path, text: str, overrides=()) -> str:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        plan_of(tmp_path, text, overrides)
    return str(error.value).removeprefix(f"{tmp_path}/some.yaml")


# What a file asks for.


def test_a_list_is_a_grid_and_the_base_comes_first(tmp_path):
    text = """
    base: {attention: {verify: three_stage}, engine.max_batch: 1}
    variants:
      - attention.pad_keys: [exact, 64, 128]
      - decode.drafter: ngram
        decode.draft_len: [1, 3]
    """
    plan = plan_of(tmp_path, text, ["dtype=float32"], prompt_tokens=100, new_tokens=20)
    names = [variant.name for variant in plan.variants]
    # 64 is the base itself, so it is not tried again.
    assert names == [
        "base",
        "pad_keys=exact",
        "pad_keys=128",
        "drafter=ngram, draft_len=1",
        "drafter=ngram, draft_len=3",
    ]
    config = plan.variants[3].settings.build()
    assert (config.dtype, config.attention.verify) == ("float32", "three_stage")
    assert (config.decode.drafter, config.decode.draft_len) == ("ngram", 1)
    assert config.engine.max_context == 192  # 100 + 20 and what a round may write past them
    assert plan.workload == Workload(100, 20, rounds=5, logprobs=1)


def test_variants_may_be_nested_like_the_base(tmp_path):
    nested = plan_of(tmp_path, "variants: [{cache: {local_layers: [paged, full]}}]")
    dotted = plan_of(tmp_path, "variants: [{cache.local_layers: [paged, full]}]")
    assert [v.key() for v in nested.variants] == [v.key() for v in dotted.variants]
    assert len(nested.variants) == 3


def test_each_machine_has_its_workload(tmp_path):
    text = """
    variants: [{cache.local_layers: full}]
    workload: {cpu: {new_tokens: 9}, gpu: {new_tokens: 10, rounds: 2}}
    """
    assert plan_of(tmp_path, text).workload == Workload(192, 9, 5, logprobs=1)
    gpu = plan_of(tmp_path, text, backend="gpu", prompt_tokens=77).workload
    assert gpu == Workload(77, 10, 2, logprobs=0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "variants:\n  - cache.local_layers: full\n  - attention.pad_key: 64",
            ":3: attention.pad_key: '64': unknown key; did you mean attention.pad_keys?",
        ),
        (
            "variants:\n  - cache.local_layers: [ring, rings]",
            ":2: cache.local_layers: 'rings' is not one of ring, paged, full",
        ),
        ("base: {attention.pad_kys: 64}\nvariants: [{}]", "did you mean attention.pad_keys?"),
        ("variant: []", ":1: variant: []: unknown key; did you mean variants?"),
        ("variants: [{model: random:31b}]", "variants share the weights of the base"),
        ("variants: {cache.local_layers: full}", "must be a list"),
        ("variants: [full]", "is not `key: value`"),
        ("variants: [{}]\nworkload: {cpu: {new_token: 5}}", "did you mean new_tokens?"),
        ("variants: [{}]\nworkload: {cpu: {new_tokens: 1}}", "1 is too few"),
        ("base: {engine.max_context: 64}\nvariants: [{}]", "does not hold 192 prompt and 48 new"),
        ("variants: []", "variants: is empty; give at least one"),
        ("variants: [{cache.local_layers: []}]", "cache.local_layers: an empty list is no variant"),
        ("variants: [{cache: {local_layer: full}}]", "did you mean cache.local_layers?"),
        ("base: {}\nvariants: [{}]\nbase: {}", ":3: base: is given twice"),
        ("variants: [{cache: {}}]", "is not `key: value`"),
        (
            "variants: [{cache: {local_layers: full}, cache.local_layers: paged}]",
            "cache.local_layers: is given twice",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(tmp_path, text, says):
    assert says in refusal(tmp_path, text)


def test_an_override_of_the_command_line_is_checked_too(tmp_path):
    text = "variants: [{cache.local_layers: full}]"
    assert "did you mean dtype" in refusal(tmp_path, text, ["dtpe=float32"])


def test_the_command_refuses_a_typo_in_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "a.yaml").write_text("variants: [{attention.pad_key: 64}]")
    paths = "configs/ablations/ring.yaml", str(tmp_path / "a.yaml")
    arguments = ["--config", *paths, "--output", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "carat_jax.bench.ablate", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "did you mean attention.pad_keys?" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--output", "{taken}"], "--output {taken}: File exists; give a folder to write to"),
        (["--output", "{folder}/taken/x"], "Not a directory; give a folder"),
        (["--output", ""], "give --config FILE.yaml ... and --output DIR"),
        (["configs/ablations/ring.yaml", "--output", "{folder}/o"], "ring.yaml is given twice"),
        (["{folder}/ring.yaml", "--output", "{folder}/o"], "ring.yaml is given twice"),
    ],
)
def test_an_output_that_cannot_be_used_is_named(tmp_path, capsys, arguments, says):
    (tmp_path / "taken").write_text("")
    names = {"taken": tmp_path / "taken", "folder": tmp_path}
    given = [text.format(**names) for text in arguments]
    ablate._FLAGS.unparse_flags()
    assert ablate.main(["ablate", "--config", "configs/ablations/ring.yaml", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says.format(**names) in line


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_valid_on_both_machines_and_take_a_model(path):
    for backend in ("cpu", "gpu"):
        plan = read_plan(path, ["model=random:31b"], backend, {})
        assert len(plan.variants) > 1
        assert plan.base.settings.build().model == "random:31b"


@pytest.mark.parametrize(("backend", "model"), [("cpu", "tiny"), ("gpu", "random:31b")])
def test_every_padding_looks_at_other_key_counts(backend, model):
    plan = read_plan(Path("configs/ablations/padding.yaml"), [f"model={model}"], backend, {})
    prompt, new = plan.workload.prompt_tokens, plan.workload.new_tokens
    counts = {}
    for variant in plan.variants:
        config = variant.settings.build()
        rungs = key_rungs(config, config.engine.max_context)
        # From the first token's round to the one that is dispatched ahead of the last token.
        held, pad = range(prompt + 1, prompt + new + 2), config.attention.pad_keys
        counts[pad] = {padded_keys(n, pad, rungs) for n in held}
    assert counts.keys() == {"exact", 64, 128, 256}
    assert len(counts["exact"]) == new + 1
    assert len(set.union(*counts.values())) == sum(map(len, counts.values()))  # none in common


# Interruptions and failures, with invented measurements.

TEXT = """
base: {engine.max_batch: 1}
variants:
  - cache.local_layers: [paged, full]
  - cache.global_layers: v_rot
"""


class Scripted(Bench):
    """Measures nothing; `script` maps a variant's name to what happens instead."""

    def __init__(self, folder: Path, script: dict):
        self._records = Records(str(folder / "rows.jsonl"), "abc1234", echo=False)
        rows = Rows(folder / "rows.jsonl", self._records)
        super().__init__(rows, self._records.environment)
        self.script, self.measured = script, []

    def _measure(self, plan, variant):
        self.measured.append(variant.name)
        if error := self.script.get(variant.name):
            raise error
        ms = 5.0 + len(self.measured) / 10
        return {
            "ms_token": ms, "base_ms_token": 5.0, "speedup": 5.0 / ms, "speedup_min": 4.9 / ms,
            "speedup_max": 5.2 / ms, "read_gb_s": 4.0, "tokens_s": 1e3 / ms,
            "accepted": 1.0, "ms_round": ms, "gb_s": 2.0, "of_read": 0.5, "kv_bytes": 2**20,
            "compile_s": 1.5, "compilations": 9, "compilations_while_timed": 0,
            "engine": "impl xla", "max_logprob_difference": 1e-5, "first_difference": None,
            "reference": "float32", "text": "abcdef", "bits": "123456",
        }  # fmt: skip

    def table(self, plan, folder: Path) -> str:
        keys = [self.key(plan, variant) for variant in plan.variants]
        return ablation_report.table(plan, self.rows.of(keys))


def test_an_interrupted_run_goes_on_where_it_stopped_and_ends_in_the_same_table(tmp_path):
    plan = plan_of(tmp_path, TEXT)
    first = Scripted(tmp_path, {"local_layers=full": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        first.run(plan)
    assert first.measured == ["base", "local_layers=paged", "local_layers=full"]
    before = first.table(plan, tmp_path).splitlines()
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write('{"key": "cut sho')  # and the last line was not written to its end

    second = Scripted(tmp_path, {})
    second.run(plan)
    assert second.measured == ["local_layers=full", "global_layers=v_rot"]
    after = second.table(plan, tmp_path)
    assert [line for line in before if line.startswith(("| base", "| local"))] == [
        line for line in after.splitlines() if line.startswith(("| base", "| local_layers=paged"))
    ]
    third = Scripted(tmp_path, {})
    third.run(plan)
    assert third.measured == []
    assert third.table(plan, tmp_path) == after


def test_a_variant_that_fails_is_a_row_with_its_reason_and_is_tried_again(tmp_path):
    plan = plan_of(tmp_path, TEXT)
    reason = RuntimeError("RESOURCE_EXHAUSTED: 12 | 3 bytes\nand a stack")
    bench = Scripted(tmp_path, {"local_layers=full": reason})
    bench.run(plan)
    assert bench.measured[-1] == "global_layers=v_rot"  # the others are unaffected
    failed = "| local_layers=full | failed: RuntimeError: RESOURCE_EXHAUSTED: 12 \\| 3 bytes |"
    assert failed in bench.table(plan, tmp_path)
    again = Scripted(tmp_path, {})
    again.run(plan)
    assert again.measured == ["local_layers=full"]
    assert "failed" not in again.table(plan, tmp_path)


def test_other_settings_code_or_workload_are_other_measurements(tmp_path):
    plan = plan_of(tmp_path, TEXT)
    bench = Scripted(tmp_path, {})
    bench.run(plan)
    for other in (
        plan_of(tmp_path, TEXT, ["dtype=float32"]),
        plan_of(tmp_path, TEXT, new_tokens=30),
    ):
        keys = {bench.key(other, variant) for variant in other.variants}
        assert not any(map(bench.rows.finished, keys))
    for changed in ("code", "device", "jaxlib"):
        newer = Bench(bench.rows, bench._records.environment | {changed: "another"})
        assert not bench.rows.finished(newer.key(plan, plan.base))
    # A commit of the same sources, of their docs for example, is no other measurement.
    newer = Bench(bench.rows, bench._records.environment | {"commit": "def"})
    assert bench.rows.finished(newer.key(plan, plan.base))


def test_lines_that_are_no_rows_are_passed_over(tmp_path):
    lines = b'{}\n3\n\xff\xfe\n[1]\nnull\n{"key": 1}'
    (tmp_path / "rows.jsonl").write_bytes(lines)
    plan = plan_of(tmp_path, TEXT)
    bench = Scripted(tmp_path, {})
    bench.run(plan)
    assert len(bench.measured) == 4
    assert (tmp_path / "rows.jsonl").read_bytes().startswith(lines + b"\n")


def test_a_ctrl_c_that_a_callback_swallowed_is_raised_again(tmp_path):
    plan = plan_of(tmp_path, TEXT)
    bench = Scripted(tmp_path, {})
    bench.interrupt.happened = True
    with pytest.raises(KeyboardInterrupt):
        bench.run(plan)
    assert bench.measured == ["base"]


def test_ctrl_c_ends_the_program_once_told_and_keeps_what_was_printed():
    program = """if True:
        import os, signal
        from carat_jax.bench.interrupt import Interrupt
        with Interrupt():
            pass
        with Interrupt() as interrupt:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("told", interrupt.happened)
            os.kill(os.getpid(), signal.SIGINT)
            print("never")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "told True\n")


def test_the_table_says_what_was_told_apart_and_by_how_much(tmp_path):
    plan = plan_of(tmp_path, TEXT)
    bench = Scripted(tmp_path, {})
    bench.run(plan)
    text = bench.table(plan, tmp_path)
    # The second to be measured took 5.2 ms, the base 5.0 beside it: 0.96, of rounds from 0.94 to 1.
    assert "| local_layers=paged | 5.2 | 5 | 0.96 x (0.94 to 1.00) |" in text
    assert "tiny, bfloat16, cpu, " in text
    assert "limit*: reading a large array in\nthe same process, 4 GB/s" in text


def test_what_differs_in_a_mixture_is_not_taken_for_a_fault(tmp_path):
    plan, bench = plan_of(tmp_path, TEXT), Scripted(tmp_path, {})
    bench.run(plan)
    rows = bench.rows.of(bench.key(plan, variant) for variant in plan.variants)
    rounded = {"reference": "plain JAX in bfloat16"}
    for engine, is_told in (("impl triton", False), ("impl triton, experts dense", True)):
        text = ablation_report.table(plan, [row | rounded | {"engine": engine} for row in rows])
        assert "so the reference rounds as well" in text
        assert ("a rounding that turns the choice of an expert" in text) == is_told


def test_the_picture_has_every_row(tmp_path):
    plan = plan_of(tmp_path, TEXT)
    bench = Scripted(tmp_path, {"local_layers=full": ValueError("no")})
    bench.run(plan)
    rows = bench.rows.of(bench.key(plan, variant) for variant in plan.variants)
    text = ablation_report.write(tmp_path, plan, rows)
    assert (tmp_path / "some.md").read_text() == text
    assert (tmp_path / "some.png").stat().st_size > 10_000


def test_ctrl_c_and_a_full_disk_while_a_table_is_written_are_told(tmp_path, capsys, monkeypatch):
    plans = [dataclasses.replace(plan_of(tmp_path, TEXT), name=name) for name in ("one", "two")]
    bench, written = Scripted(tmp_path, {}), []

    def write(folder, plan, rows):
        written.append(plan.name)
        raise [OSError(28, "No space left on device"), KeyboardInterrupt()][len(written) - 1]

    monkeypatch.setattr(ablation_report, "write", write)
    assert ablate._run(plans, bench, tmp_path) == 1
    assert written == ["one", "two"]
    told = capsys.readouterr().err
    assert "error: one: [Errno 28] No space left on device" in told
    assert "interrupted: the same command draws it again" in told


# A real one.


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Rows of a short float32 run on `tiny`, by name."""
    folder = tmp_path_factory.mktemp("ablation")
    text = """
    base: {dtype: float32, engine: {max_batch: 2, prefill_chunks: [32]}}
    variants:
      - cache.local_layers: full
      - attention.impl: triton
      - engine.max_batch: 1
    """
    plan = plan_of(folder, text, **SHORT)
    records = Records(str(folder / "rows.jsonl"), "abc1234", echo=False)
    Bench(Rows(folder / "rows.jsonl", records), records.environment).run(plan)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return {row["variant"]: row for row in map(json.loads, lines)}


def test_rows_of_a_real_run_are_exact_complete_and_traceable(measured):
    rows = measured
    assert list(rows) == ["base", "local_layers=full", "attention.impl=triton", "max_batch=1"]
    for name in ("base", "local_layers=full"):
        row = rows[name]
        assert row["max_logprob_difference"] < 1e-4
        assert (row["first_difference"], row["reference"]) == (None, "float32")
        assert row["compilations_while_timed"] == 0
        assert row["compile_s"] > 0
        assert row["tokens_s"] == pytest.approx(2e3 / row["ms_token"], rel=1e-3)
        assert row["workload"] == SHORT | {"logprobs": 1}
        assert row["commit"] == "abc1234"
        assert row["device"]
    assert rows["base"]["text"] == rows["local_layers=full"]["text"]
    # Another number of slots has prompts of its own, and the base beside it keeps its two.
    row = rows["max_batch=1"]
    assert row["tokens_s"] == pytest.approx(1e3 / row["ms_token"], rel=1e-3)
    assert row["max_logprob_difference"] < 1e-4
    assert row["speedup_min"] <= row["speedup"] <= row["speedup_max"]
    assert rows["local_layers=full"]["config"]["cache.local_layers"] == "full"
    # tiny: 10 rings of 4 heads x 32 and 2 global caches of 64, in float32, two slots of 128.
    row, window = rows["local_layers=full"], 128
    assert row["kv_bytes"] == 2 * 4 * 2 * window * (10 * 4 * 32 + 2 * 64)
    assert rows["base"]["kv_bytes"] < row["kv_bytes"]
    # A round reads every weight, and 23 keys and values of each layer: no more than it may see.
    for name in ("base", "local_layers=full"):
        moved = rows[name]["gb_s"] * 1e9 * rows[name]["ms_round"] / 1e3
        held = 2 * 4 * 2 * 23 * (10 * 4 * 32 + 2 * 64)
        assert moved == pytest.approx(2 * 9_643_096 + held, rel=2e-3)
