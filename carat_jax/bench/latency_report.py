"""The table and the picture of a latency benchmark, from its rows alone.

`python -m carat_jax.bench.latency_report FOLDER` writes both again beside `latency.jsonl`. Of
several records of one case the last counts.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carat_jax.bench.drawing import Theme, save
from carat_jax.bench.measure import origin

_QUEUED = ("context", "batch", "step", "ms", "least GB", "GB/s", "of limit")
_ENGINE = (
    "context", "batch", "streams", "prefill s", "tokens/s", "ms a token", "ms a step", "p50", "p90",
    "p99", "over queued", "Python ms", "of step", "tokens a round", "cache GB",
)  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The last record of each case of each context, batch and switch, as they were measured."""
    lines = path.read_text(encoding="utf-8").splitlines()
    latest = {}
    for row in map(json.loads, lines):
        if row.get("bench") == "latency":
            latest[row["context"], row["batch"], row["case"], name_of(row)] = row
    return list(latest.values())


def name_of(row: Mapping[str, Any]) -> str:
    """The case, and the switches that are not as usual."""
    switches = ["v_rot"] if row["global_layers"] == "v_rot" else []
    if rows := row.get("uniform_rows"):
        switches.append(f"{rows} uniform rows")
    switches += [against] if (against := row.get("against")) else []
    return ", ".join([row["case"].removeprefix("engine_"), *switches])


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Two Markdown tables: steps that are queued, and streams through the public engine."""
    has_experts = any("experts_read" in row for row in rows)
    queued = [(*_QUEUED, *(["experts read"] if has_experts else []))] + [
        (
            str(row["context"]),
            str(row["batch"]),
            name_of(row),
            f"{row['ms']:.2f}",
            f"{row['least_gb']:.2f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['of_limit']:.0%}",
            *([f"{row['experts_read']:.1f}"] if "experts_read" in row else [""] * has_experts),
        )
        for row in rows
        if "ms" in row
    ]
    streams = [_ENGINE] + [
        (
            str(row["context"]),
            str(row["batch"]),
            name_of(row),
            f"{row['prefill_s']:.3f}",
            f"{row['prefill_tokens_per_s']:.0f}",
            f"{row['tpot_ms']:.2f}",
            f"{row['step_ms']:.2f}",
            *(f"{row[f'step_ms_p{q}']:.2f}" for q in (50, 90, 99)),
            f"{row['step_over_queued']:.3f}",
            f"{row['python_ms']:.2f}",
            f"{row['python_of_step']:.0%}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['cache_gb']:.2f}",
        )
        for row in rows
        if row["case"].startswith("engine_")
    ]
    return "\n".join(_markdown(lines) for lines in (queued, streams) if len(lines) > 1)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = ("| " + " | ".join(line) + " |\n" for line in lines)
    return "".join([head, "|" + "---|" * len(lines[0]) + "\n", *body])


def draw(rows: Sequence[Mapping[str, Any]]):
    """A drawing of the queued steps: their time, of it the least that the limits allow."""
    shown = [row for row in rows if "ms" in row]

    def fill(figure: Any, theme: Theme) -> None:
        axis, places = figure.subplots(), range(len(shown))
        axis.barh(places, [row["ms"] for row in shown], height=0.66, color=theme.faint)
        least = [row["ms"] * row["of_limit"] for row in shown]
        axis.barh(places, least, height=0.66, color=theme.ours)
        for place, row in zip(places, shown, strict=True):
            words = f" {row['ms']:.2f} ms, {row['of_limit']:.0%}"
            axis.text(row["ms"], place, words, va="center", fontsize=9)
        names = [f"{name_of(row)}, batch {row['batch']}, {row['context']:,} keys" for row in shown]
        axis.set_yticks(places, names)
        axis.invert_yaxis()
        axis.set_xlim(right=1.25 * max(row["ms"] for row in shown))
        axis.set_xlabel("ms a step; in colour the least that it could take")
        axis.set_title("Queued steps and the limit")
        axis.grid(axis="y", visible=False)

    return fill, (8.0, 1.2 + 0.32 * len(shown))


def write(folder: Path) -> None:
    """Writes `latency.md` and `latency-*.png` beside the rows, and prints the tables."""
    rows = read_rows(folder / "latency.jsonl")
    text = f"{origin(rows)}\n{tables(rows)}"
    (folder / "latency.md").write_text(text, encoding="utf-8")
    print(text)
    fill, size = draw(rows)
    save(fill, folder, "latency", size)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
