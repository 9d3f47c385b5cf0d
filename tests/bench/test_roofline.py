"""The roofline's arithmetic: parts against what they have to do, families, the rest of a step."""

import subprocess
import sys
from pathlib import Path

import pytest

from carat_jax.bench import roofline, roofline_report
from carat_jax.bench.cost import Cost
from carat_jax.bench.kernel_trace import Kernel

RATES = (4e12, 800e12)
GROUPS = {("local", "down"): (50.0, 100.0), ("global", "norm"): (20.0, 10.0)}
LEAST = {("local", "down"): Cost(200e6, 8e9), ("head", "rest"): Cost(40e6, 40e9)}


def test_a_part_is_set_against_the_limit_that_binds():
    rows = roofline.part_rows(GROUPS, LEAST, RATES)
    told = [(r["kind"], r["part"], r["kernels"], r["us"], r["least_us"]) for r in rows]
    assert told == [
        ("local", "down", 50.0, 100.0, pytest.approx(50.0)),
        ("global", "norm", 20.0, 10.0, 0.0),
        # Fused into another part's kernel; 40 MB take 10 us, 40 GFLOP would take 50.
        ("head", "rest", 0.0, 0.0, pytest.approx(50.0)),
    ]


def test_a_step_is_its_kernels_and_what_is_between_them():
    parts = roofline.part_rows(GROUPS, LEAST, RATES)
    step = roofline.step_row(parts, 150e-6, Cost(240e6, 48e9), RATES)
    assert (step["us"], step["kernels"], step["kernels_us"]) == (pytest.approx(150), 70, 110)
    assert step["gaps_us"] == pytest.approx(40)
    assert (step["matmul_us"], step["but_matmuls_us"]) == (100, pytest.approx(50))
    assert step["least_us"] == pytest.approx(60)
    assert step["of_limit"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (("local", "attend"), "local attention"),
        (("global", "rope"), "global attention"),
        (("global", "qkv"), "projections"),
        (("local", "gelu"), "MLP"),
        (("local", "norm"), "norms"),
        (("rest", "norm"), "norms"),
        (("local", "rest"), "rest"),
        (("head", "rest"), "head"),
        (("draft", "down"), "draft"),
        (("draft", "down", "draft"), "MLP"),
        (("draft", "head", "draft"), "head"),
        (("draft", "attend", "draft"), "attention"),
    ],
)
def test_kinds_and_parts_make_families(place, expected):
    assert roofline_report.family(*place) == expected


def test_the_table_adds_up_families_and_names_the_gaps():
    fixed = {"phase": "decode", "batch": 1, "context": 6000}
    parts = roofline.part_rows(GROUPS, LEAST, RATES)
    step = roofline.step_row(parts, 150e-6, Cost(240e6, 48e9), RATES)
    lines = roofline_report.tables([fixed | row for row in (*parts, step)]).splitlines()
    assert lines[0] == (
        "**decode**, batch 1, 6,000 keys: 0.150 ms, 40% of the limit; "
        "everything but the matmuls 50 us"
    )
    mixture = fixed | step | {"experts_read": 23.46}
    assert "6,000 keys, 23.5 experts a layer: 0.150 ms" in roofline_report.tables([mixture])
    assert lines[4:] == [
        "| MLP | 50 | 100.0 | 66.7% | 50.0 | 50% |",
        "| norms | 20 | 10.0 | 6.7% |  |  |",
        "| head |  | 0.0 | 0.0% | 50.0 |  |",
        "| launches and gaps |  | 40.0 | 26.7% |  |  |",
    ]


def test_kernels_are_listed_with_their_mean():
    text = roofline.kernel_list("decode", [Kernel("gemm", "", "local/o", 2.0, 9.0)])
    assert text.splitlines()[2] == "      9.0     2.0     4.50  gemm | local/o"


def test_the_program_runs_on_tiny_and_a_second_run_takes_the_first_ones_place(tmp_path):
    command = [
        *(sys.executable, "-m", "carat_jax.bench.roofline", "--config", "configs/tiny.yaml"),
        *("--context", "60", "--phases", "decode", "--steps", "2", "--top", "3"),
        *("--output", str(tmp_path)),
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "roofline.jsonl"
    rows = roofline_report.read_rows(path)
    parts, step = rows[:-1], rows[-1]
    assert step["kind"] == "step"
    assert step["kernels_us"] == pytest.approx(sum(row["us"] for row in parts), rel=1e-2)
    assert {"local", "global", "head"} <= {row["kind"] for row in parts}
    listing = (tmp_path / "kernels-decode-batch1.txt").read_text()
    assert "/local/" in listing
    assert "layer_0" not in listing
    assert "**decode**, batch 1, 60 keys" in (tmp_path / "roofline.md").read_text()
    assert (tmp_path / "roofline-batch1-60-light.png").stat().st_size > 10_000
    path.write_text(path.read_text() * 2)
    assert roofline_report.read_rows(path) == rows
