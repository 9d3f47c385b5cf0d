"""The table and the picture of a serving benchmark, from its rows alone.

`python -m carat_jax.bench.serving_report FOLDER` writes both again beside `serving.jsonl`. Of
several records of one row under one load the last counts.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carat_jax.bench.drawing import Theme, save
from carat_jax.bench.measure import origin

WHAT = {
    "a": "pages, one program a query head",
    "b": "+ rings",
    "c": "+ grouped heads",
    "d": "+ 3 drafts, 2.5 tokens a round (simulated)",
}
_HEAD = (
    "load", "row", "tokens/s", "over a", "ms a token, p50", "over a", "p90", "p99",
    "first token s, p50", "p99", "tokens a round", "compiling s", "lost",
)  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The last record of each row under each load, in the order of loads and rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("bench") == "serving"]
    latest = {(load_of(row), row["row"]): row for row in rows}
    return [latest[key] for key in sorted(latest)]


def load_of(row: Mapping[str, Any]) -> tuple[str, float]:
    """("concurrency", 4) or ("rate", 0.5)."""
    kind = "concurrency" if row["mode"] == "closed" else "rate"
    return kind, row[kind]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; "over a" is how many times better than row a under the same load."""
    base = {load_of(row): row for row in rows if row["row"] == "a"}
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for row in rows:
        first = base.get(load_of(row))
        cells = (
            f"{load_of(row)[0]} {load_of(row)[1]:g}",
            f"{row['row']}: {WHAT[row['row']]}",
            f"{row['output_tokens_per_s']:.1f}",
            _times(row["output_tokens_per_s"], first and first["output_tokens_per_s"]),
            f"{row['tpot_ms_p50']:.2f}",
            _times(first and first["tpot_ms_p50"], row["tpot_ms_p50"]),
            *(f"{row[f'tpot_ms_p{q}']:.2f}" for q in (90, 99)),
            *(f"{row[f'first_token_s_p{q}']:.3f}" for q in (50, 99)),
            f"{row['tokens_per_round']:.2f}",
            f"{row['compile_s']:.0f}",
            f"{row['lost']}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _times(more: float | None, less: float | None) -> str:
    return f"{more / less:.2f} x" if more and less else ""


def _name_lines(
    axis: Any, ends: Sequence[tuple[float, float, str]], colours: Mapping[str, str]
) -> None:
    """Names lines at their ends (y, x, name): from below, each clear of the one before."""
    height = 0.06 * axis.get_ylim()[1]
    place = -height
    for y, x, name in sorted(ends):
        place = max(y, place + height)
        axis.annotate(
            name, (x, place), (6, 0), textcoords="offset points", va="center",
            color=colours[name], weight="bold",
        )  # fmt: skip
    axis.set_ylim(top=max(axis.get_ylim()[1], place + height))


def draw(rows: Sequence[Mapping[str, Any]]):
    """A drawing of one mode's rows: output tokens a second, and milliseconds a token."""
    panels = (
        ("Output tokens a second", "output_tokens_per_s", "tokens/s"),
        ("Time per output token, median", "tpot_ms_p50", "ms"),
    )
    is_closed = load_of(rows[0])[0] == "concurrency"
    unit_of_load = "requests at a time" if is_closed else "arrivals a second"
    loads = sorted({load_of(row)[1] for row in rows})

    def fill(figure: Any, theme: Theme) -> None:
        colours = dict(zip(WHAT, (theme.base, theme.third, theme.fourth, theme.ours), strict=True))
        axes = figure.subplots(1, 2)
        for axis, (title, key, unit) in zip(axes, panels, strict=True):
            axis.set_title(title)
            axis.set_ylabel(unit)
            if len(loads) == 1:
                bars = axis.bar(
                    [row["row"] for row in rows],
                    [row[key] for row in rows],
                    width=0.6,
                    color=[colours[row["row"]] for row in rows],
                )
                axis.bar_label(bars, fmt="%.1f", padding=2)
                axis.margins(y=0.12)
                axis.grid(axis="x", visible=False)
                axis.set_xlabel(f"{loads[0]:g} {unit_of_load}")
                continue
            ends = []
            for name in sorted({row["row"] for row in rows}):
                line = [row for row in rows if row["row"] == name]
                xs, ys = [load_of(row)[1] for row in line], [row[key] for row in line]
                axis.plot(xs, ys, color=colours[name], marker="o", markersize=4)
                ends.append((ys[-1], xs[-1], name))
            axis.set_xscale("log", base=2)
            axis.set_xticks(loads, [f"{load:g}" for load in loads])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            _name_lines(axis, ends, colours)
            axis.set_xlabel(unit_of_load)
        words = [f"{name}: {WHAT[name]}" for name in sorted({row["row"] for row in rows})]
        figure.supxlabel("    ".join(words), fontsize=8.5, color=theme.ink)

    return fill


def write(folder: Path) -> None:
    """Writes `serving.md` and a picture of each mode beside the rows, and prints the table."""
    rows = read_rows(folder / "serving.jsonl")
    text = f"{origin(rows)}\n{table(rows)}"
    (folder / "serving.md").write_text(text, encoding="utf-8")
    print(text)
    for mode in sorted({row["mode"] for row in rows}):
        chosen = [row for row in rows if row["mode"] == mode]
        save(draw(chosen), folder, f"serving-{mode}", (8.0, 3.4))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
