"""`python -m carat_jax.bench.rounds`: what a decode step and a speculative round cost on a device.

Times the engine's own executables over caches that hold `--context` positions: plain decoding, the
verify pass of M + 1 rows alone, and the whole round with a drafter; then the public engine's time
per output token over the queued step's. Steps are queued and the clock is read once; variants
alternate; medians. JSON lines go to `--output`.

    python -m carat_jax.bench.rounds --config configs/random-31b.yaml --context 6000 --batches 1,8
"""

import sys
import time

import numpy as np
from absl import app, flags

import carat_jax
from carat_jax.bench import device_steps
from carat_jax.bench.measure import Records, read_bandwidth
from carat_jax.config import read_settings

_CONFIG = flags.DEFINE_string("config", None, "YAML settings.")
_SET = flags.DEFINE_multi_string("set", [], "key=value; repeatable.")
_CONTEXT = flags.DEFINE_integer("context", 6000, "Positions each slot holds.")
_BATCHES = flags.DEFINE_list("batches", ["1"], "Slots that decode, one run each.")
_DRAFTER = flags.DEFINE_string("drafter", "assistant", "Drafter of the round that is timed.")
_DRAFT_LEN = flags.DEFINE_integer("draft_len", 3, "Drafts of a round.")
_OUTPUT = flags.DEFINE_string("output", None, "File that JSON lines are appended to.")
_COMMIT = flags.DEFINE_string("commit", None, "Commit of the code, where there is no git.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps queued between two readings of the clock.")


def _device_rows(engine: carat_jax.Engine, batch: int, records: Records) -> dict[str, float]:
    """Times the steps of one batch size; seconds by name."""
    sizes = {"max_batch": batch, "max_context": _CONTEXT.value + device_steps.ROOM}
    base = engine.variant(engine=sizes, decode={"drafter": "none"})
    drafted = base.variant(
        decode={
            "drafter": _DRAFTER.value,
            "draft_len": _DRAFT_LEN.value,
            "simulate_acceptance": (_DRAFT_LEN.value + 2) / 2,
        }
    )
    plain, speculative = (device_steps.filled(made, _CONTEXT.value) for made in (base, drafted))
    rows = _DRAFT_LEN.value + 1
    steps = {
        "decode": device_steps.whole_round(plain),
        "verify_1": device_steps.verify(plain, 1),
        f"verify_{rows}": device_steps.verify(speculative, rows),
        "round": device_steps.whole_round(speculative),
    }
    compile_time = device_steps.compile_all(steps)
    times = device_steps.alternate(steps, _STEPS.value)
    median = device_steps.medians(times)
    weights, bandwidth = engine.stats()["weight_bytes"], read_bandwidth()
    for name, seconds in median.items():
        temp = steps[name].compiled.memory_analysis().temp_size_in_bytes
        records.add(
            bench="rounds", case=name, batch=batch, context=_CONTEXT.value,
            drafter=_DRAFTER.value if name == "round" else "none", ms=seconds * 1e3,
            ms_min=min(times[name]) * 1e3, ms_max=max(times[name]) * 1e3,
            weights_gb_s=weights / seconds / 1e9, read_gb_s=bandwidth / 1e9,
            temp_mb=temp / 1e6, compile_s_all=compile_time, model=engine.config.model,
        )  # fmt: skip
    records.add(
        bench="rounds", case="ratios", batch=batch, context=_CONTEXT.value,
        verify_over_decode=median[f"verify_{rows}"] / median["verify_1"],
        round_over_decode=median["round"] / median["decode"],
        draft_and_accept_ms=(median["round"] - median[f"verify_{rows}"]) * 1e3,
        model=engine.config.model,
    )  # fmt: skip
    return median


def _engine_row(engine: carat_jax.Engine, decode_s: float, records: Records) -> None:
    """The public engine on one stream: prefill, and time per output token over the step's."""
    made = engine.variant(
        engine={
            "max_batch": 1,
            "max_context": _CONTEXT.value + device_steps.ROOM,
            "prefill_chunks": [2048],
        },
        decode={"drafter": "none"},
    )
    ids = np.random.default_rng(0).integers(10, 4000, _CONTEXT.value).tolist()
    for _ in range(2):  # the first compiles
        arrivals, started = [], time.perf_counter()
        for _ in made.stream(ids, temperature=0, max_tokens=100, ignore_eos=True):
            arrivals.append(time.perf_counter())
    tpot = (arrivals[-1] - arrivals[10]) / (len(arrivals) - 11)
    gaps = np.diff(arrivals[10:])
    records.add(
        bench="rounds", case="engine_stream", batch=1, context=_CONTEXT.value,
        time_to_first_token_s=arrivals[0] - started, tpot_ms=tpot * 1e3,
        tpot_p99_ms=float(np.quantile(gaps, 0.99)) * 1e3, tpot_over_step=tpot / decode_s,
        model=engine.config.model,
    )  # fmt: skip


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        # The base engine only holds the weights: its own caches are kept small.
        small = [*_SET.value, "engine.max_batch=1", "engine.max_context=256"]
        engine = carat_jax.load(read_settings(_CONFIG.value, small))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    records = Records(_OUTPUT.value, _COMMIT.value)
    for batch in map(int, _BATCHES.value):
        median = _device_rows(engine, batch, records)
        if batch == 1:
            _engine_row(engine, median["decode"], records)


if __name__ == "__main__":
    app.run(main)
