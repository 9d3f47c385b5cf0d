"""The table and the picture of an ablation, from its rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carat_jax.bench.ablation_plan import Plan
from carat_jax.bench.drawing import LIGHT, Theme, save

_COLUMNS = (
    "variant", "ms a token", "base beside it", "against base", "tokens/s", "accepted",
    "ms a round", "GB/s", "of limit", "caches", "compile s", "max log-prob. diff.", "first diff.",
    "text", "bits",
)  # fmt: skip

_NOTES = """\
*ms a token*: of one stream, after its first token; *tokens/s*: of all slots together. Times are
medians of {rounds} rounds, in each of which the variant and the base took turns. *base beside it*:
the base's ms a token in those turns. *against base*: its time over the variant's, above 1 faster,
and in brackets the least and the largest of the rounds; where they lie on both sides of 1, the two
were not told apart. *accepted*: tokens a round commits. *GB/s*: the bytes a round has to read at
least (weights once, the visible keys and values) over its time; *limit*: reading a large array in
the same process, {read} GB/s. *caches*: of all slots. *compile s*: how much longer the first call
took. Exactness is against {reference}: the largest difference of a log-probability (natural, of the
written token and of the 20 likeliest) at any place of the variant's own text, and the first token,
counted from 0, that differs from the reference's text. Rows of the same *text* wrote the same ids,
rows of the same *bits* gave them the same log-probabilities, bit for bit."""
_ROUNDED = """\
The weights in float32 do not fit beside the model's own, so the reference rounds as well: the
differences are those of two roundings, and the first token that differs is no fault of either."""
_TURNED = """\
The model is a mixture: a rounding that turns the choice of an expert changes a log-probability by
far more than a rounding does."""
_ON_XLA = """\
Attention is plain JAX here (`impl xla`): `fused` is one masked pass over the whole cache and no
kernel, so `verify`, `group_heads` and `fuse_rows` of `attention` say nothing about a GPU, and
products are XLA's either way."""
_NO_EXPERTS = "The model has no experts: `moe.impl` changes nothing of it."
# Where the axis of differences begins.
_FLOOR = 1e-7
_LOGPROBS = (
    "The timed steps report log-probabilities too, so that each compiles once and not twice."
)
_SMALL = """\
The weights fit in a processor's cache, so GB/s can exceed the limit, which is memory's."""


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}" if value < 1000 else f"{value:.0f}"


def _bytes(value: float) -> str:
    return f"{value / 2**20:.2f} MiB" if value < 2**30 else f"{value / 2**30:.2f} GiB"


def in_words(row: Mapping[str, Any]) -> str:
    """A row as the program reports it while it runs."""
    if row.get("failed"):
        return f"failed: {row['failed']}"
    return (
        f"{row['ms_token']:.3g} ms a token, {row['speedup']:.2f} x the base beside it, compiled in "
        f"{row['compile_s']:.1f} s, log-probabilities within {row['max_logprob_difference']:.2g}"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    if row.get("failed"):
        # A bar would end the cell.
        reason = row["failed"].replace("|", "\\|")
        return [row["variant"], f"failed: {reason}"] + [""] * (len(_COLUMNS) - 2)
    first = row["first_difference"]
    return [
        row["variant"],
        _number(row["ms_token"]),
        _number(row["base_ms_token"]),
        _race(row),
        _number(row["tokens_s"]),
        f"{row['accepted']:.2f}",
        _number(row["ms_round"]),
        _number(row["gb_s"]),
        f"{row['of_read']:.0%}",
        _bytes(row["kv_bytes"]),
        f"{row['compile_s']:.1f}",
        f"{row['max_logprob_difference']:.1e}",
        "none" if first is None else str(first),
        row["text"],
        row["bits"],
    ]


def _beside(row: Mapping[str, Any]) -> str:
    """The two times of a race."""
    told = f"{_number(row['ms_token'])} ms"
    return told if row["variant"] == "base" else f"{told}, base {_number(row['base_ms_token'])}"


def _race(row: Mapping[str, Any]) -> str:
    """How much faster than the base, and what the rounds say."""
    middle, low, high = (row[key] for key in ("speedup", "speedup_min", "speedup_max"))
    return f"{middle:.2f} x" + (f" ({low:.2f} to {high:.2f})" if low < high else "")


def table(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown of a plan's rows: what was run, the table, how to read it."""
    done = [row for row in rows if not row.get("failed")]
    given = {k: v for k, (v, origin) in plan.base.settings.given.items() if origin != "workload"}
    load = plan.workload
    lines = [
        f"# {plan.title}",
        "",
        f"Base: `{', '.join(f'{k}={v}' for k, v in given.items())}`.",
        f"Workload: {load.prompt_tokens} prompt and {load.new_tokens} new tokens a slot.",
    ]
    if done:
        lines.append(_origin(plan, done[0]))
    lines += ["", "| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    if done:
        read = [row["read_gb_s"] for row in done]
        read = " to ".join(dict.fromkeys(_number(bound) for bound in (min(read), max(read))))
        names = dict.fromkeys(row["reference"] for row in done)
        numbers = {"rounds": load.rounds, "read": read, "reference": ", ".join(names)}
        lines += ["", _NOTES.format(**numbers)]
        has_experts = any("experts" in row["engine"] for row in done)
        if any(name != "float32" for name in names):
            lines += ["", _ROUNDED] + (["", _TURNED] if has_experts else [])
        if load.logprobs:
            lines += ["", _LOGPROBS]
        if any("impl xla" in row["engine"] for row in done):
            lines += ["", _ON_XLA]
        tries_experts = any("moe.impl" in variant.overrides for variant in plan.variants)
        if tries_experts and not has_experts:
            lines += ["", _NO_EXPERTS]
        if any(row["of_read"] > 1 for row in done):
            lines += ["", _SMALL]
        if any(row["compilations_while_timed"] for row in done):
            lines += ["", "Something compiled while it was timed: see `rows.jsonl`."]
    return "\n".join(lines) + "\n"


def _origin(plan: Plan, row: Mapping[str, Any]) -> str:
    """What a row was measured with."""
    config = plan.base.settings.build()
    commit = f"commit {row['commit'][:7]}" if row["commit"] else f"code {row['code']}"
    return f"{config.model}, {config.dtype}, {row['device']}, jax {row['jax']}, {commit}."


def _draw(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Bars of the time a token over the base's beside it, and of the largest difference."""
    done = [row for row in rows if not row.get("failed")]

    def draw(figure: Any, theme: Theme) -> None:
        time, exact = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        places = range(len(done))
        colours = [theme.base if row["variant"] == "base" else theme.ours for row in done]
        times = [1 / row["speedup"] for row in done]
        # Each round's ratio: minutes lie between the rows, and a machine has good and bad ones.
        ends = [(1 / row["speedup_max"], 1 / row["speedup_min"]) for row in done]
        errors = [
            [max(0, middle - low) for middle, (low, _) in zip(times, ends, strict=True)],
            [max(0, high - middle) for middle, (_, high) in zip(times, ends, strict=True)],
        ]
        style = {"ecolor": theme.ink, "elinewidth": 1, "capsize": 2}
        bars = time.barh(
            places, times, xerr=errors, color=colours, height=0.65, alpha=0.85, error_kw=style
        )
        time.bar_label(bars, [_beside(row) for row in done], padding=3)
        time.axvline(1, color=theme.ink, linewidth=0.8)
        time.set_yticks(places, [row["variant"] for row in done])
        time.invert_yaxis()
        time.set_xlim(0, 1.5 * max(high for _, high in ends))
        time.set_xlabel("time a token, the base's beside it = 1")
        time.grid(axis="y", visible=False)
        time.set_title(plan.title)
        worst = [max(row["max_logprob_difference"], _FLOOR) for row in done]
        exact.hlines(places, _FLOOR, worst, color=theme.faint)
        exact.scatter(worst, places, color=colours, zorder=3)
        for place, (value, row) in enumerate(zip(worst, done, strict=True)):
            text = f"{row['max_logprob_difference']:.0e}"
            exact.annotate(text, (value, place), (8, 0), textcoords="offset points", va="center")
        exact.set_xscale("log")
        exact.set_xlim(_FLOOR, 30)
        exact.set_xlabel(f"log-prob. difference\nto {done[0]['reference']}")
        exact.grid(visible=False)
        load = plan.workload
        tokens = f"{load.prompt_tokens} + {load.new_tokens} tokens a slot"
        figure.supxlabel(f"{_origin(plan, done[0])} {tokens}", fontsize=8)

    return draw


def write(folder: Path, plan: Plan, rows: Sequence[Mapping[str, Any]]) -> str:
    """Writes `NAME.md` and `NAME.png`; returns the table."""
    text = table(plan, rows)
    done = [row for row in rows if not row.get("failed")]
    if done:
        save(_draw(plan, rows), folder, plan.name, (9, 1.5 + 0.38 * len(done)), (LIGHT,))
        text += f"\n![{plan.title}]({plan.name}.png)\n"
    (folder / f"{plan.name}.md").write_text(text, encoding="utf-8")
    return text
