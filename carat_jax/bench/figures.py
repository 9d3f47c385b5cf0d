"""`python -m carat_jax.bench.figures --output docs/figures`: the project's figures, from its rows.

Every point is a record of `carat_jax/bench/results/*.jsonl`; nothing is measured here. Each figure
is drawn for light and for dark pages, and `sources.md` says which records it was drawn from. A
figure whose records are not there is left out, with the command that makes them.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags

from carat_jax.bench import command, serving_report
from carat_jax.bench.drawing import Theme, check_can_draw, save
from carat_jax.cache.ring import RingCache, ring_capacity
from carat_jax.numerics.attention import visible

RESULTS = Path(__file__).with_name("results")
_FLAGS = flags.FlagValues()
flags.DEFINE_string("output", "docs/figures", "Folder of the pictures.", flag_values=_FLAGS)
flags.DEFINE_boolean("help", False, "Print this.", flag_values=_FLAGS)

Row = dict[str, Any]
Draw = Callable[[Any, Theme], None]
# The case of the announcement: four positions of eight query heads a KV head, against 6,005 keys.
_KEYS, _POSITIONS, _GROUP, _MULTIPLE = 6005, 4, 8, 64


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
      name: of its files.
      size: width and height in inches.
      rows: picks its records out of all; none and it is left out.
      draw: from those records to a drawing.
      command: what makes the records.
    """

    name: str
    size: tuple[float, float]
    rows: Callable[[list[Row]], list[Row]]
    draw: Callable[[list[Row]], Draw]
    command: str


def read_rows(folder: Path = RESULTS) -> list[Row]:
    """All committed records, of each file in its order."""
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def _of(case: str, **fixed: Any) -> Callable[[list[Row]], list[Row]]:
    fixed = {"case": case, **fixed}
    return lambda rows: [row for row in rows if fixed.items() <= row.items()]


def _served(rows: list[Row], only_one: bool = False) -> list[Row]:
    """The 31B's closed-loop records, the last of each row and load; of one: of most requests."""
    closed = {"bench": "serving", "mode": "closed", "model": "random:31b"}
    found = [row for row in rows if closed.items() <= row.items()]
    latest = {(serving_report.load_of(row), row["row"]): row for row in found}
    kept = [latest[key] for key in sorted(latest)]
    fullest = max(kept, key=lambda row: row["requests"], default=None)
    return [row for row in kept if not only_one or row["concurrency"] == fullest["concurrency"]]


# 1. The ladder.


def _draw_ladder(rows: list[Row]) -> Draw:
    def draw(figure: Any, theme: Theme) -> None:
        axis = figure.subplots()
        times = [row["tpot_ms_p50"] for row in rows]
        colours = [theme.base, theme.third, theme.fourth, theme.ours]
        bars = axis.barh(range(len(rows)), times, color=colours[: len(rows)], height=0.62)
        first = times[0]
        axis.bar_label(bars, [f" {t:.1f} ms   {first / t:.2f} x" for t in times])
        axis.set_yticks(range(len(rows)), [serving_report.WHAT[row["row"]] for row in rows])
        axis.invert_yaxis()
        axis.set_xlim(0, 1.35 * max(times))
        axis.set_xlabel("ms an output token, median of the requests")
        axis.grid(axis="y", visible=False)
        count = rows[0]["concurrency"]
        together = "one request" if count == 1 else f"{count} requests"
        axis.set_title(f"Each idea on top of the last, {together} at a time")

    return draw


# 2. Time against the key count.


def _draw_padding(rows: list[Row]) -> Draw:
    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots(1, 2)
        for axis, variant, title in zip(
            axes, ("scores", "whole"), ("Scores alone", "Scores, softmax, values"), strict=True
        ):
            times = {row["keys"]: row["net_us"] for row in rows if row["variant"] == variant}
            keys = sorted(times)
            rungs = [n for n in keys if n % _MULTIPLE == 0]
            padded = [n for n in keys if -(-n // _MULTIPLE) * _MULTIPLE in times]
            axis.plot(keys, [times[n] for n in keys], color=theme.base, linewidth=1.2)
            axis.plot(
                padded, [times[-(-n // _MULTIPLE) * _MULTIPLE] for n in padded],
                color=theme.ours, drawstyle="steps-mid",
            )  # fmt: skip
            axis.scatter(rungs, [times[n] for n in rungs], color=theme.ours, zorder=3)
            for rung in rungs:
                axis.axvline(rung, color=theme.faint, linewidth=1, zorder=0)
            axis.set_ylim(0, 1.3 * max(times.values()))
            axis.set_title(title)
            axis.set_xlabel("keys")
            axis.set_ylabel("us a layer")
            axis.text(keys[0], 1.2 * max(times.values()), "exact", color=theme.base, weight="bold")
            axis.text(
                keys[len(keys) // 4], 1.2 * max(times.values()),
                f"padded to a multiple of {_MULTIPLE}", color=theme.ours, weight="bold",
            )  # fmt: skip

    return draw


# 3. The last columns of the score matrix.


def _draw_columns(_: list[Row]) -> Draw:
    end = -(-_KEYS // _MULTIPLE) * _MULTIPLE
    columns = np.arange(end - _MULTIPLE, end)
    positions = jnp.arange(_KEYS - _POSITIONS, _KEYS)
    held = jnp.asarray(np.where(columns < _KEYS, columns, -1))
    seen = np.asarray(visible(positions[None], held[None], None)[0])
    kinds = np.where(seen, 0, np.where(columns < _KEYS, 1, 2))
    cells = np.tile(kinds, (_GROUP, 1))  # query head by query head, each its four positions

    def draw(figure: Any, theme: Theme) -> None:
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        axis = figure.subplots()
        colours = [theme.ours, theme.base, theme.faint]
        axis.pcolormesh(
            np.arange(_MULTIPLE + 1), np.arange(len(cells) + 1), cells,
            cmap=ListedColormap(colours), vmin=0, vmax=2, edgecolors=theme.paper, linewidth=0.6,
        )  # fmt: skip
        for head in range(1, _GROUP):
            axis.axhline(head * _POSITIONS, color=theme.paper, linewidth=2.5)
        axis.invert_yaxis()
        axis.grid(visible=False)
        axis.set_xticks([0.5, _KEYS - columns[0] - 0.5, 63.5], [columns[0], _KEYS - 1, end - 1])
        middle = [head * _POSITIONS + _POSITIONS / 2 for head in range(_GROUP)]
        axis.set_yticks(middle, [f"head {head}" for head in range(_GROUP)])
        axis.tick_params(length=0)
        axis.set_xlabel("key position")
        axis.set_title(f"The last {_MULTIPLE} columns of {len(cells)} rows against {_KEYS:,} keys")
        words = ("seen", "not yet: causal mask", "padding, never written")
        patches = [Patch(color=c, label=w) for c, w in zip(colours, words, strict=True)]
        axis.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)

    return draw


# 4. The attention core against the context.

_CORES = (
    ("torch_sdpa", "torch SDPA", "ink"),
    ("per_head", "one program a query head", "base"),
    ("three_stage_padded", "grouped, three stages", "fourth"),
    ("kv", "grouped, fused", "ours"),
    ("v_rot", "grouped, fused, v_rot", "third"),
)


def _draw_core(rows: list[Row]) -> Draw:
    read = max(row["gb_per_s"] / row["of_read"] for row in rows if row.get("of_read"))

    def draw(figure: Any, theme: Theme) -> None:
        axis = figure.subplots()
        for variant, words, colour in _CORES:
            line = sorted((row for row in rows if row["variant"] == variant), key=_keys)
            if not line:
                continue
            xs = [row["keys"] for row in line]
            # SDPA was timed call by call, so there is no empty chain to take off.
            ys = [row.get("net_us", row["gross_us"]) for row in line]
            axis.plot(xs, ys, color=getattr(theme, colour), marker="o", markersize=5, label=words)
        least = sorted((row for row in rows if row["variant"] == "kv"), key=_keys)
        xs, ys = [row["keys"] for row in least], [row["bytes"] / read / 1e3 for row in least]
        axis.plot(xs, ys, color=theme.ink, linestyle=":", label="keys and values read once")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(xs, [f"{x:,}" for x in xs])
        axis.minorticks_off()
        axis.set_xlabel("keys")
        axis.set_ylabel("us a layer")
        axis.set_title("Attention core of a global layer, four positions to verify")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw


def _keys(row: Row) -> int:
    return row["keys"]


def _grouped_core(rows: list[Row]) -> list[Row]:
    shape = {"heads": 32, "kv_heads": 4, "positions": _POSITIONS}
    wanted = {name for name, _, _ in _CORES}
    found = [row for row in _of("grouped", **shape)(rows) if row["variant"] in wanted]
    return list({(row["variant"], row["keys"]): row for row in found}.values())


# Rings: what the slots hold, and what the alternatives cost.

_WINDOW, _ROWS, _SHOWN = 8, 4, 26


def _slots_after_each_position() -> np.ndarray:
    """What each slot of a small ring holds after each of `_SHOWN` positions; -1 for nothing."""
    capacity = ring_capacity(_WINDOW, _ROWS)
    empty = jnp.full((1, 1, capacity, 1), -1.0)
    ring, history = RingCache(empty, empty), []
    for position in range(_SHOWN):
        row = jnp.full((1, 1, 1, 1), float(position))
        at = jnp.array([position]), jnp.array([1])
        ring, _ = ring.extend(row, row, *at, slots=None, window=_WINDOW)
        history.append(np.asarray(ring.k[0, 0, :, 0], int))
    return np.array(history)


def _draw_rings(rows: list[Row]) -> Draw:
    history = _slots_after_each_position()
    seen = (history >= 0) & (np.arange(_SHOWN)[:, None] - history < _WINDOW)

    def draw(figure: Any, theme: Theme) -> None:
        from matplotlib.colors import ListedColormap

        left, right = figure.subplots(1, 2, width_ratios=(1, 1))
        left.pcolormesh(
            seen.T, cmap=ListedColormap([theme.paper, theme.ours]), vmin=0, vmax=1,
            edgecolors=theme.faint, linewidth=0.4,
        )  # fmt: skip
        for (step, slot), held in np.ndenumerate(history):
            if held >= 0:
                colour = theme.paper if seen[step, slot] else theme.ink
                where = step + 0.5, slot + 0.55
                left.text(*where, held, ha="center", va="center", fontsize=5.5, color=colour)
        left.grid(visible=False)
        left.set_xlabel("tokens, one after another")
        left.set_ylabel("slot")
        left.set_title(f"A ring of {history.shape[1]} slots, window {_WINDOW}")
        colours = {"ring": theme.ours, "paged": theme.third, "full": theme.base}
        for variant, colour in colours.items():
            line = sorted((row for row in rows if row["variant"] == variant), key=_context)
            line = [row for row in line if row["fits"]]
            xs, ys = [row["context"] for row in line], [row["net_us"] for row in line]
            right.plot(xs, ys, color=colour, marker="o", markersize=5, label=variant)
        contexts = sorted({row["context"] for row in rows})
        right.set_xscale("log")
        right.set_yscale("log")
        right.set_xticks(contexts, [f"{n:,}" for n in contexts])
        right.set_yticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
        right.minorticks_off()
        right.set_xlabel("context")
        right.set_ylabel("us a layer")
        right.set_title("Attention of a local layer")
        right.legend()

    return draw


def _context(row: Row) -> int:
    return row["context"]


def _layouts(rows: list[Row]) -> list[Row]:
    found = _of("layouts", batch=1)(rows)
    return list({(row["variant"], row["context"]): row for row in found}.values())


# 6. Shares of the limit.


def _phases(rows: list[Row]) -> list[Row]:
    of_31b = {"bench": "roofline", "model": "random:31b"}
    found = [row for row in rows if of_31b.items() <= row.items() and "of_limit" in row]
    steps = [row for row in found if row["kind"] == "step"]
    latest = {(row["phase"], row["batch"]): row for row in steps}
    return list(latest.values())


def _draw_phases(rows: list[Row]) -> Draw:
    def draw(figure: Any, theme: Theme) -> None:
        axis = figure.subplots()
        shares = [row["of_limit"] for row in rows]
        bars = axis.barh(range(len(rows)), shares, color=theme.ours, height=0.6)
        axis.bar_label(bars, [f" {share:.0%}" for share in shares])
        axis.set_yticks(
            range(len(rows)), [f"{row['phase']}, {row['batch']} at a time" for row in rows]
        )
        axis.invert_yaxis()
        axis.set_xlim(0, 1.12)
        axis.axvline(1, color=theme.ink, linestyle=":")
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        axis.set_xlabel("least time that its bytes and operations take, over the time it takes")
        axis.grid(axis="y", visible=False)
        axis.set_title("Share of the card's limit, by phase")

    return draw


_KERNELS = (
    "python -m carat_jax.bench.kernels --cases={} --out carat_jax/bench/results/{}-h200.jsonl"
)
_SERVING = (
    "python -m carat_jax.bench.serving --config configs/random-31b.yaml --output DIR, "
    "its serving.jsonl to carat_jax/bench/results/serving-h200.jsonl"
)
FIGURES = (
    Figure("rings", (8.0, 3.2), _layouts, _draw_rings, _KERNELS.format("layouts", "kernels")),
    Figure("1-ladder", (8.0, 2.8), lambda rows: _served(rows, True), _draw_ladder, _SERVING),
    Figure(
        "2-padding", (8.0, 3.2), _of("padding"), _draw_padding, _KERNELS.format(*["padding"] * 2)
    ),
    Figure("3-columns", (8.0, 3.6), lambda rows: [{}], _draw_columns, ""),
    Figure(
        "4-core", (8.0, 3.8), _grouped_core, _draw_core, _KERNELS.format("grouped,torch", "kernels")
    ),
    Figure("5-serving", (8.0, 3.4), _served, serving_report.draw, _SERVING),
    Figure(
        "6-limit", (8.0, 2.8), _phases, _draw_phases,
        "python -m carat_jax.bench.roofline --config configs/random-31b.yaml "
        "--batches 1,8 --output DIR, its roofline.jsonl to carat_jax/bench/results/",
    ),
)  # fmt: skip


def sources(figure: Figure, rows: Sequence[Row]) -> str:
    """A line that says where a figure comes from."""
    if not figure.command:
        return f"- `{figure.name}`: no measurement; drawn with the engine's own visibility rule."

    def values(key: str) -> str:
        return ", ".join(sorted({str(row.get(key, "unknown"))[:12] for row in rows}))

    commands = sorted({row.get("command", figure.command) for row in rows})
    return (
        f"- `{figure.name}`: {len(rows)} records; {values('device')}, jax {values('jax')}, commit "
        f"{values('commit')}; " + "; ".join(f"`{command}`" for command in commands)
    )


def write(folder: Path, rows: list[Row], figures: Iterable[Figure] = FIGURES) -> list[str]:
    """Draws what there are records for; returns the lines about what there are none for."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, missing = [], []
    for figure in figures:
        chosen = figure.rows(rows)
        if not chosen:
            missing.append(f"{figure.name}: no records; they are made by: {figure.command}")
            continue
        save(figure.draw(chosen), folder, figure.name, figure.size)
        lines.append(sources(figure, chosen))
    head = "Drawn by `python -m carat_jax.bench.figures` from `carat_jax/bench/results/`."
    (folder / "sources.md").write_text("\n".join([head, "", *lines, ""]), encoding="utf-8")
    return missing


def main() -> int:
    """Runs the program."""
    check_can_draw()
    for line in write(Path(_FLAGS.output), read_rows()):
        print(line)
    return 0


if __name__ == "__main__":
    command.run(main, _FLAGS, __doc__)
