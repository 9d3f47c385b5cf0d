"""`python -m carat_jax.bench.latency`: time per output token, and what it is made of.

For every context and batch: the engine's own executables, queued (plain decoding, the verify pass
alone, the whole round with a drafter), then the public engine on as many streams: prefill, time per
output token, the loop's step over the queued one, and the Python in it. Each is set against the
least time that the bytes and operations allow at the rates this run reads and multiplies at.

    python -m carat_jax.bench.latency --config configs/random-31b.yaml --context 6000 --batches 1,8
    python -m carat_jax.bench.latency --config configs/random-31b.yaml --context 131072
    python -m carat_jax.bench.latency --config configs/random-31b.yaml --against products.impl=xla

Writes `latency.jsonl` (appended to), and the table and the picture of all its rows, to --output;
without it rows are only printed.
"""

import dataclasses
import functools
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from carat_jax.bench import command, cost, device_steps, latency_report, measure, workload
from carat_jax.bench.cost import Cost
from carat_jax.bench.drawing import check_can_draw
from carat_jax.bench.expert_reads import experts_read
from carat_jax.bench.measure import Records
from carat_jax.bench.replay import (
    EngineStep,
    Replay,
    Served,
    percentiles,
    progress_of,
    summary,
    warm_up,
)
from carat_jax.bench.workload import TraceRequest
from carat_jax.engine.api import Engine

_FLAGS = command.new_flags("Folder of the rows, the table and the picture.")
_own = {"flag_values": _FLAGS}
_CONTEXT = flags.DEFINE_list("context", ["6000"], "Positions each slot holds; one or more.", **_own)
_BATCHES = flags.DEFINE_list("batches", ["1"], "Slots that decode; one or more.", **_own)
_DRAFTER = flags.DEFINE_string("drafter", "assistant", "Drafter; none leaves it out.", **_own)
_DRAFT_LEN = flags.DEFINE_integer("draft_len", 3, "Drafts of a round.", 1, **_own)
_ACCEPTANCE = flags.DEFINE_float(
    "simulate_acceptance", 2.5, "Tokens a round commits on average.", 1, **_own
)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps queued between two readings.", 1, **_own)
_TOKENS = flags.DEFINE_integer("tokens", 200, "Tokens of each stream.", 8, **_own)
_AGAINST = flags.DEFINE_string(
    "against", None, "key=value: queued steps with it too, in turns with the others.", **_own
)
_STREAMS = flags.DEFINE_boolean("streams", True, "Whether to run the public engine too.", **_own)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What this device reads and multiplies in this run, bytes and operations a second."""

    bytes_per_s: float
    flops_per_s: float

    def shares(self, least: Cost, seconds: float) -> dict[str, float]:
        """How near a step of `seconds` is to what it has to do at least."""
        return {
            "least_gb": least.bytes / 1e9,
            "least_tflop": least.flops / 1e12,
            "gb_per_s": least.bytes / seconds / 1e9,
            "read_gb_per_s": self.bytes_per_s / 1e9,
            "tflop_per_s": least.flops / seconds / 1e12,
            "matmul_tflop_per_s": self.flops_per_s / 1e12,
            "of_limit": least.seconds(self.bytes_per_s, self.flops_per_s) / seconds,
        }


# An engine without a drafter, and one with it.
Pair = tuple[Engine, Engine | None]
# What a record is of: the case, and the setting of --against or nothing.
Case = tuple[str, str]


def queued_rows(
    pairs: Mapping[str, Pair], context: int, count: int, limits: Limits
) -> dict[Case, dict[str, Any]]:
    """Times the executables of all `pairs`, by what is set in them, in turns, and their ratios."""
    steps, costs = {}, {}
    for setting, (plain, drafted) in pairs.items():
        slots = plain.config.engine.max_batch
        steps["decode", setting] = device_steps.whole_round(device_steps.filled(plain, context))
        steps["verify_1", setting] = device_steps.verify(plain.loop, 1)
        once = functools.partial(cost.pass_costs, plain, context, 1, slots)
        costs |= {("decode", setting): once, ("verify_1", setting): once}
        if drafted is not None:
            rows, loop = drafted.loop.num_rows, device_steps.filled(drafted, context)
            verify, whole = (f"verify_{rows}", setting), ("round", setting)
            steps[verify] = device_steps.verify(loop, rows)
            steps[whole] = device_steps.whole_round(loop)
            costs[verify] = functools.partial(cost.pass_costs, drafted, context, rows, slots)
            costs[whole] = functools.partial(cost.round_costs, drafted, context, slots)
    compile_s = device_steps.compile_all(steps)
    times = device_steps.alternate(steps, count)
    median = device_steps.medians(times)
    read = experts_read(steps)
    least = {case: cost.total(costs[case](experts_read=read[case])) for case in steps}
    records = {
        case: {
            "ms": seconds * 1e3,
            "ms_min": min(times[case]) * 1e3,
            "ms_max": max(times[case]) * 1e3,
            **limits.shares(least[case], seconds),
            **({} if read[case] is None else {"experts_read": read[case]}),
            "temp_mb": steps[case].temp_bytes / 1e6,
            "compile_s_all": compile_s,
        }
        for case, seconds in median.items()
    }
    for setting, (plain, drafted) in pairs.items():
        device_steps.forget(plain.loop)
        if drafted is not None:
            device_steps.forget(drafted.loop)
            verify = median[f"verify_{drafted.loop.num_rows}", setting]
            whole = median["round", setting]
            records["ratios", setting] = {
                "verify_over_decode": verify / median["verify_1", setting],
                "round_over_decode": whole / median["decode", setting],
                "draft_and_accept_ms": (whole - verify) * 1e3,
            }
    return records


def stream_row(
    engine: Engine, context: int, tokens: int, queued_ms: float, limits: Limits
) -> dict[str, Any]:
    """As many streams as the engine has slots, each `tokens` long after `context` prompt ids."""
    slots = engine.config.engine.max_batch
    trace = [TraceRequest(i, i, context, tokens, None, 0.0) for i in range(slots)]
    prompts = workload.prompt_ids(trace, engine.model.vocab_size)
    compile_s = warm_up(engine, [context])
    before = engine.stats()
    replay = Replay(engine, trace, prompts)
    served = replay.closed(slots)
    after = engine.stats()
    counted = progress_of(after, before)
    told = {key: value for key, value in summary(served).items() if key in ("requests", "lost")}
    prefill_s = max(s.token_times[0] for s in served)
    prefill = cost.total(cost.pass_costs(engine, 0, context, 1, logit_rows=1)) * slots
    return {
        **told,
        "prefill_s": prefill_s,
        "prefill_tokens_per_s": slots * context / prefill_s,
        "prefill_of_limit": limits.shares(prefill, prefill_s)["of_limit"],
        **steady(served, replay.steps, queued_ms),
        **counted,
        "compile_s": compile_s,
        "cache_gb": after["cache_bytes"] / 1e9,
        "weight_gb": after["weight_bytes"] / 1e9,
    }


def steady(served: list[Served], steps: list[EngineStep], queued_ms: float) -> dict[str, float]:
    """Figures of the time in which all streams run: from the last first token to the first end."""
    start = max(s.token_times[0] for s in served)
    end = min(s.token_times[-1] for s in served)
    inside = [step for step in steps if start < step.end <= end]
    if not inside:
        raise ValueError("--tokens: a stream ends before the last one begins; raise it")
    counts = [sum(start < t <= end for t in s.token_times) for s in served]
    gaps = [
        gap
        for s in served
        for gap in np.diff(sorted({t for t in s.token_times if start <= t <= end}))
    ]
    step_s, python_s = (end - start) / len(inside), float(np.mean([s.python for s in inside]))
    return {
        "tpot_ms": (end - start) * len(served) / sum(counts) * 1e3,
        "output_tokens_per_s": sum(counts) / (end - start),
        "step_ms": step_s * 1e3,
        **percentiles(gaps, "step_ms", 1e3),
        "queued_ms": queued_ms,
        "step_over_queued": step_s * 1e3 / queued_ms,
        "python_ms": python_s * 1e3,
        "python_of_step": python_s / step_s,
    }


def _against() -> dict[str, Any]:
    """The setting of --against.

    Raises:
      ValueError: it is none, or changes more than how a step is computed.
    """
    if _AGAINST.value is None:
        return {}
    try:
        values = command.values_of([_AGAINST.value])
    except ValueError as error:
        raise ValueError(str(error).replace("--set:", "--against:", 1)) from None
    sections = ("cache", "attention", "products", "moe")
    if bad := [key for key in values if key.partition(".")[0] not in sections]:
        raise ValueError(
            f"--against: {bad[0]} is not of {', '.join(sections)}, which change how a step is "
            "computed and nothing else"
        )
    return values


def _measure(
    base: Engine, against: Mapping[str, Any], context: int, batch: int, limits: Limits
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """All records of one context and batch, each once it is known: a long prefill may be cut."""
    room = max(device_steps.ROOM, _TOKENS.value)
    sizes = {"max_batch": batch, "max_context": device_steps.with_room(base, context, room)}
    plain = base.variant(engine=sizes, decode={"drafter": "none"})
    drafted = None
    if _DRAFTER.value != "none":
        decode = {
            "drafter": _DRAFTER.value,
            "draft_len": _DRAFT_LEN.value,
            "simulate_acceptance": _ACCEPTANCE.value,
        }
        drafted = base.variant(engine=sizes, decode=decode)
    pairs = {"": (plain, drafted)}
    if against:
        pairs[_AGAINST.value] = plain.variant(**against), drafted and drafted.variant(**against)
    queued = queued_rows(pairs, context, _STEPS.value, limits)
    yield from queued.items()
    if _STREAMS.value:
        for engine, case in ((plain, "decode"), (drafted, "round")):
            if engine is not None:
                queued_ms = queued[case, ""]["ms"]
                row = stream_row(engine, context, _TOKENS.value, queued_ms, limits)
                yield (f"engine_{case}", ""), row
                device_steps.forget(engine.loop)


def main() -> int:
    """Runs the benchmark; 1 if a stream lost a token or something compiled while it ran."""
    output = _FLAGS.output and Path(_FLAGS.output)
    if output:
        check_can_draw()
        output.mkdir(parents=True, exist_ok=True)
    rival = _against()  # what is wrong with it is said before anything is loaded
    base = command.load_weights(_FLAGS, "latency.jsonl")
    records = Records(output and str(output / "latency.jsonl"), _FLAGS.commit)
    limits = Limits(*measure.ceilings())
    is_wrong = False
    contexts = command.whole_numbers("context", _CONTEXT.value)
    batches = command.whole_numbers("batches", _BATCHES.value)
    for context in contexts:
        for batch in batches:
            for (case, against), record in _measure(base, rival, context, batch, limits):
                records.add(
                    bench="latency", case=case, model=base.config.model, dtype=base.config.dtype,
                    global_layers=base.config.cache.global_layers,
                    uniform_rows=base.config.decode.uniform_rows, against=against,
                    context=context, batch=batch,
                    drafter=_DRAFTER.value if "round" in case else "none", **record,
                )  # fmt: skip
                is_wrong |= bool(record.get("lost") or record.get("compilations"))
            gc.collect()  # these caches, before the next are made
    if output:
        latency_report.write(output)
    return int(is_wrong)


if __name__ == "__main__":
    command.run(main, _FLAGS, __doc__)
