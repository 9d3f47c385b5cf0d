"""`python -m carat_jax.bench.serving`: the committed trace through the engine, row by row.

The rows of the ladder are cumulative and run in one process on the same weights: (a) pages for the
local layers and one kernel program a query head, (b) with rings, (c) with grouped heads, (d) with
speculation, whose acceptance is simulated, because random weights accept nothing. Compiling comes
first, is timed apart, and must not happen again.

    python -m carat_jax.bench.serving --config configs/random-31b.yaml --concurrency 4
    python -m carat_jax.bench.serving --config configs/random-31b.yaml --mode open --rows d

Writes `serving.jsonl` (appended to), and the table and the picture of all its rows, to --output.
"""

import gc
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from carat_jax.bench import command, serving_report, workload
from carat_jax.bench.drawing import check_can_draw
from carat_jax.bench.measure import Records
from carat_jax.bench.replay import Replay, progress_of, summary, warm_up
from carat_jax.bench.workload import TraceRequest
from carat_jax.engine.api import Engine

_FLAGS = command.new_flags("Folder of the rows, the table and the pictures.")
_own = {"flag_values": _FLAGS}
_MODE = flags.DEFINE_enum("mode", "closed", ["closed", "open"], "Who decides when to send.", **_own)
_CONCURRENCY = flags.DEFINE_list(
    "concurrency", ["1", "2", "4", "8"], "Requests at a time in a closed loop.", **_own
)
_RATES = flags.DEFINE_list(
    "rates", [str(rate) for rate in workload.RATES], "Arrivals a second in an open loop.", **_own
)
_SLOTS = flags.DEFINE_integer("slots", 8, "Slots of the engine in an open loop.", 1, **_own)
_ROWS = flags.DEFINE_list("rows", ["a", "b", "c", "d"], "Rows of the ladder.", **_own)
_DRAFTER = flags.DEFINE_string("drafter", "assistant", "Drafter of row d.", **_own)
_TRACE = flags.DEFINE_string("trace", str(workload.TRACE), "The trace.", **_own)
_REQUESTS = flags.DEFINE_integer("requests", None, "Only the first so many of it.", 1, **_own)
_SCALE = flags.DEFINE_float("scale", 1.0, "All lengths times this; 0.04 suits `tiny`.", **_own)

DRAFT_LEN, TOKENS_PER_ROUND = 3, 2.5
# What each row adds to the one above it.
LADDER = {
    "a": {
        "cache.local_layers": "paged",
        "cache.global_layers": "kv",
        "attention.verify": "fused",
        "attention.group_heads": False,
        "decode.drafter": "none",
    },
    "b": {"cache.local_layers": "ring"},
    "c": {"attention.group_heads": True},
    "d": {"decode.draft_len": DRAFT_LEN, "decode.simulate_acceptance": TOKENS_PER_ROUND},
}


def row_settings(row: str, drafter: str) -> dict[str, Any]:
    """Every setting of a row, those of the rows above it included.

    Raises:
      ValueError: there is no such row.
    """
    if row not in LADDER:
        raise ValueError(f"--rows: no row {row!r}; there are {', '.join(LADDER)}")
    settings: dict[str, Any] = {}
    for name, added in LADDER.items():
        settings |= added
        if name == "d":
            settings["decode.drafter"] = drafter
        if name == row:
            break
    return settings


def _loads() -> list[tuple[str, float, int]]:
    """(name of the load, its value, slots) of every run of a row."""
    if _MODE.value == "open":
        return [("rate", float(rate), _SLOTS.value) for rate in _RATES.value]
    counts = command.whole_numbers("concurrency", _CONCURRENCY.value)
    return [("concurrency", count, count) for count in counts]


def serve(
    base: Engine,
    settings: dict[str, Any],
    load: tuple[str, float, int],
    trace: Sequence[TraceRequest],
    prompts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """One row under one load: everything its record says."""
    kind, value, slots = load
    # Whole blocks of keys; more than the longest request needs is never written.
    context = -(-workload.context_of(trace) // 256) * 256
    sizes = {
        "engine.max_batch": slots, "engine.max_context": context,
        "engine.max_queue": max(base.config.engine.max_queue, len(trace)),
    }  # fmt: skip
    engine = base.variant(**settings, **sizes)
    print(engine.describe(), file=sys.stderr)
    compile_s = warm_up(engine)
    before = engine.stats()
    replay = Replay(engine, trace, prompts)
    served = replay.closed(int(value)) if kind == "concurrency" else replay.open(value)
    after = engine.stats()
    python_ms = statistics.mean(step.python for step in replay.steps) * 1e3
    return {
        kind: value, "slots": slots, "max_context": context, **summary(served),
        **progress_of(after, before), "compile_s": compile_s, "cache_bytes": after["cache_bytes"],
        "python_ms_per_step": python_ms,
    }  # fmt: skip


def faults(record: dict[str, Any]) -> list[str]:
    """What a run must not show: lost requests, compiling while it served, restarts."""
    must_be_none = ("lost", "compilations", "restarts")
    return [f"row {record['row']}: {record[key]} {key}" for key in must_be_none if record[key]]


def main() -> int:
    """Runs the benchmark; 1 if a run lost a request or compiled while it served."""
    if _FLAGS.output is None:
        raise ValueError("give --output DIR")
    check_can_draw()
    rows = {row: row_settings(row, _DRAFTER.value) for row in _ROWS.value}
    loads = _loads()
    trace = workload.read_trace(Path(_TRACE.value))[: _REQUESTS.value]
    trace = workload.scaled(trace, _SCALE.value) if _SCALE.value != 1 else trace
    base = command.load_weights(_FLAGS, "serving.jsonl")
    prompts = workload.prompt_ids(trace, base.model.vocab_size)
    output = Path(_FLAGS.output)
    output.mkdir(parents=True, exist_ok=True)
    records = Records(str(output / "serving.jsonl"), _FLAGS.commit)
    wrong = []
    for load in loads:
        for row, settings in rows.items():
            record = {
                "bench": "serving", "mode": _MODE.value, "row": row, "model": base.config.model,
                "dtype": base.config.dtype, "trace": Path(_TRACE.value).name,
                "scale": _SCALE.value, "settings": settings,
            } | serve(base, settings, load, trace, prompts)  # fmt: skip
            records.add(**record)
            wrong += faults(record)
            gc.collect()  # the row's caches, before the next row makes its own
    serving_report.write(output)
    for fault in wrong:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    command.run(main, _FLAGS, __doc__)
