"""The tables and pictures of a roofline benchmark, from its rows alone.

`python -m carat_jax.bench.roofline_report FOLDER` writes them again beside `roofline.jsonl`. Of
several records of one part the last counts.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carat_jax.bench.drawing import Theme, save
from carat_jax.bench.measure import origin

_HEAD = ("part of the step", "kernels", "us", "of the step", "least us", "of limit")
_ATTENTION = ("attend", "cache", "rope")
_BY_PART = {"qkv": "projections", "o": "projections", "norm": "norms", "experts": "experts"}
_BY_PART |= dict.fromkeys(("gate_up", "gelu", "down"), "MLP")

Row = Mapping[str, Any]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the last run of each phase, batch and context, in the order of the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("bench") == "roofline"]
    runs: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        run = runs[_run(row)]
        if run and run[-1]["kind"] == "step":  # which ends a phase: this begins it anew
            run.clear()
        run.append(row)
    return [row for run in runs.values() for row in run]


def _run(row: Row) -> tuple:
    return row["phase"], row["batch"], row["context"]


def family(kind: str, part: str, phase: str = "") -> str:
    """The line of the table that a kind and part of `kernel_trace.place` belong to."""
    if phase == "draft":
        return "attention" if part in _ATTENTION else _BY_PART.get(part, part)
    if kind in ("local", "global"):
        return f"{kind} attention" if part in _ATTENTION else _BY_PART.get(part, "rest")
    return "norms" if (kind, part) == ("rest", "norm") else kind


def families(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The parts of one phase added up by family, the longest first."""
    total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        if row["kind"] != "step":
            for key in ("kernels", "us", "least_us"):
                total[family(row["kind"], row["part"], row["phase"])][key] += row[key]
    return dict(sorted(total.items(), key=lambda item: -item[1]["us"]))


def by_phase(rows: Sequence[Row]) -> dict[tuple, tuple[Row, dict[str, dict[str, float]]]]:
    """(phase, batch, context) -> its step's row, and its families."""
    runs: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        runs[_run(row)].append(row)
    steps = {key: next((r for r in run if r["kind"] == "step"), None) for key, run in runs.items()}
    return {key: (steps[key], families(run)) for key, run in runs.items() if steps[key]}


def tables(rows: Sequence[Row]) -> str:
    """A Markdown table for each phase."""
    texts = []
    for (phase, batch, context), (step, found) in by_phase(rows).items():
        lines = [
            f"**{phase}**, batch {batch}, {context:,} keys{_experts(step)}: "
            f"{step['us'] / 1e3:.3f} ms, "
            f"{step['of_limit']:.0%} of the limit; everything but the matmuls "
            f"{step['but_matmuls_us']:.0f} us\n",
            "| " + " | ".join(_HEAD) + " |",
            "|" + "---|" * len(_HEAD),
        ]
        gaps = {"us": step["gaps_us"], "kernels": 0, "least_us": 0}
        for name, part in (*found.items(), ("launches and gaps", gaps)):
            cells = (
                name,
                f"{part['kernels']:.0f}" if part["kernels"] else "",
                f"{part['us']:.1f}",
                f"{part['us'] / step['us']:.1%}",
                f"{part['least_us']:.1f}" if part["least_us"] else "",
                f"{part['least_us'] / part['us']:.0%}" if part["us"] and part["least_us"] else "",
            )
            lines.append("| " + " | ".join(cells) + " |")
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


def _experts(step: Row) -> str:
    """How many experts a layer read, of a mixture."""
    return f", {step['experts_read']:.1f} experts a layer" if "experts_read" in step else ""


def draw(phases: Mapping[tuple, tuple[Row, dict[str, dict[str, float]]]]):
    """A drawing of some phases of one batch: time by family, of it the least it could be.

    A round has no panel: it is verify and draft.
    """
    phases = {key: found for key, found in phases.items() if key[0] != "round"}
    num_lines = -(-len(phases) // 2)

    def fill(figure: Any, theme: Theme) -> None:
        grid = list(figure.subplots(num_lines, min(2, len(phases)), squeeze=False).flat)
        for axis, ((phase, batch, _), (step, found)) in zip(grid, phases.items(), strict=False):
            parts = {name: part for name, part in found.items() if part["us"] > 0.002 * step["us"]}
            parts["launches, gaps"] = {"us": max(0.0, step["gaps_us"]), "least_us": 0.0}
            places = range(len(parts))
            times = [part["us"] / 1e3 for part in parts.values()]
            least = [min(part["least_us"], part["us"]) / 1e3 for part in parts.values()]
            axis.barh(places, times, height=0.66, color=theme.faint)
            axis.barh(places, least, height=0.66, color=theme.ours)
            for place, time in zip(places, times, strict=True):
                axis.text(time, place, f" {time:.2f}", va="center", fontsize=8)
            axis.set_yticks(places, list(parts), fontsize=8)
            axis.invert_yaxis()
            axis.set_xlim(0, 1.2 * max(times))
            axis.set_xlabel("ms; in colour: the least possible", fontsize=8)
            axis.grid(axis="y", visible=False)
            axis.set_title(f"{phase}, batch {batch}: {step['us'] / 1e3:.2f} ms", fontsize=10)
        for axis in grid[len(phases) :]:
            axis.set_visible(False)

    return fill, (8.0, 2.8 * num_lines)


def write(folder: Path) -> None:
    """Writes `roofline.md` and a picture of each batch and context beside the rows."""
    rows = read_rows(folder / "roofline.jsonl")
    text = f"{origin(rows)}\n{tables(rows)}"
    (folder / "roofline.md").write_text(text, encoding="utf-8")
    phases = by_phase(rows)
    for batch, context in sorted({key[1:] for key in phases}):
        chosen = {key: found for key, found in phases.items() if key[1:] == (batch, context)}
        fill, size = draw(chosen)
        save(fill, folder, f"roofline-batch{batch}-{context}", size)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
