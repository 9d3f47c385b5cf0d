"""`python -m carat_jax.bench.roofline`: where the time of each phase goes, and how much is due.

Profiles the engine's own executables over caches that hold `--context` positions: a chunk of
prefill, plain decoding, the verify pass, and the round, of which the draft is what verify does not
explain. Kernels are added up by layer kind and part and set against the least time that the bytes
and operations of that part allow at the rates this run reads and multiplies at. The queued step,
timed without the profiler, stands beside their sum: the difference is launches and gaps.

    python -m carat_jax.bench.roofline --config configs/random-31b.yaml --context 6000 --batches 1,8

Writes `roofline.jsonl` (appended to), every kernel of each phase as text, and the tables and
pictures of all rows, to --output; without it rows and the longest kernels are only printed.
"""

import functools
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import flags

from carat_jax.bench import command, cost, device_steps, kernel_trace, measure, roofline_report
from carat_jax.bench.cost import Cost
from carat_jax.bench.drawing import check_can_draw
from carat_jax.bench.expert_reads import experts_read
from carat_jax.bench.kernel_trace import Kernel
from carat_jax.bench.measure import Records
from carat_jax.engine.api import Engine

PHASES = ("prefill", "decode", "verify", "round")
_FLAGS = command.new_flags("Folder of the rows, the kernels, the tables and the pictures.")
_own = {"flag_values": _FLAGS}
_CONTEXT = flags.DEFINE_integer("context", 6000, "Positions each slot holds.", 1, **_own)
_BATCHES = flags.DEFINE_list("batches", ["1"], "Slots that decode; one or more.", **_own)
_CHUNK = flags.DEFINE_integer("chunk", 2048, "Positions of the prefill chunk.", 1, **_own)
_DRAFTER = flags.DEFINE_string("drafter", "assistant", "Drafter of the round.", **_own)
_DRAFT_LEN = flags.DEFINE_integer("draft_len", 3, "Drafts of a round.", 1, **_own)
_PHASES = flags.DEFINE_list(
    "phases", list(PHASES), "What to profile; round takes verify along.", **_own
)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps queued between two readings.", 1, **_own)
_TOP = flags.DEFINE_integer("top", 40, "Kernels printed, the longest first.", 0, **_own)

# Steps under the profiler; their kernels hardly vary.
_PROFILED = 3
_MATMULS = ("qkv", "o", "gate_up", "down", "experts", "head")
_Costs = Mapping[tuple[str, str], Cost]


class Phases:
    """The steps of the chosen phases at one batch size, and what each has to do at least."""

    def __init__(self, base: Engine, batch: int):
        context, chunk = _CONTEXT.value, min(_CHUNK.value, _CONTEXT.value)
        sizes = {"max_batch": batch, "max_context": device_steps.with_room(base, context)}
        self.steps: dict[str, device_steps.DeviceStep] = {}
        # Functions of `experts_read`, which is counted once the steps have run.
        self.costs: dict[str, Callable[..., _Costs]] = {}
        plain = base.variant(engine=sizes, decode={"drafter": "none"})
        if "prefill" in _PHASES.value:
            loop = device_steps.filled(plain.variant(), context - chunk)
            self.steps["prefill"] = device_steps.prefill(loop, chunk)
            at = plain, context - chunk, chunk
            self.costs["prefill"] = functools.partial(cost.pass_costs, *at, logit_rows=1)
        if "decode" in _PHASES.value:
            self.steps["decode"] = device_steps.whole_round(device_steps.filled(plain, context))
            self.costs["decode"] = functools.partial(cost.pass_costs, plain, context, 1, batch)
        if {"verify", "round"} & set(_PHASES.value):
            drafting = {"drafter": _DRAFTER.value, "draft_len": _DRAFT_LEN.value}
            drafted = base.variant(engine=sizes, decode=drafting)
            loop, rows = device_steps.filled(drafted, context), drafted.loop.num_rows
            self.steps["verify"] = device_steps.verify(loop, rows)
            self.steps["round"] = device_steps.whole_round(loop)
            self.costs["verify"] = functools.partial(cost.pass_costs, drafted, context, rows, batch)
            self.costs["round"] = functools.partial(cost.round_costs, drafted, context, batch)


def part_rows(
    groups: Mapping[tuple[str, str], tuple[float, float]],
    least: _Costs,
    rates: tuple[float, float],
) -> list[dict[str, Any]]:
    """A record of every kind and part: its kernels, their time and the least it could be.

    A part that has bytes to read but no kernel of its own was fused into another's; its least time
    is shown with no time beside it.
    """
    rows = []
    for kind, part in (*groups, *(key for key in least if key not in groups)):
        count, us = groups.get((kind, part), (0.0, 0.0))
        due = least.get((kind, part), Cost())
        rows.append(
            {
                "kind": kind,
                "part": part,
                "kernels": count,
                "us": us,
                "least_gb": due.bytes / 1e9,
                "least_tflop": due.flops / 1e12,
                "least_us": due.seconds(*rates) * 1e6,
            }
        )
    return rows


def step_row(
    parts: list[dict[str, Any]], seconds: float, least: Cost, rates: tuple[float, float]
) -> dict[str, Any]:
    """The record of a whole step: what its kernels add up to, and what they do not."""
    step_us, kernels_us = seconds * 1e6, sum(row["us"] for row in parts)
    matmul_us = sum(row["us"] for row in parts if {row["kind"], row["part"]} & {*_MATMULS})
    return {
        "kind": "step", "us": step_us, "kernels": sum(row["kernels"] for row in parts),
        "kernels_us": kernels_us, "gaps_us": step_us - kernels_us, "matmul_us": matmul_us,
        "but_matmuls_us": step_us - matmul_us, "least_gb": least.bytes / 1e9,
        "least_tflop": least.flops / 1e12, "least_us": least.seconds(*rates) * 1e6,
        "of_limit": least.seconds(*rates) / seconds,
    }  # fmt: skip


def kernel_list(phase: str, kernels: list[Kernel]) -> str:
    """The kernels of a step as text, the longest first."""
    lines = [f"{phase}: kernels of a step", "  us/step   count  mean us  kernel | scope"]
    for k in kernels:
        lines.append(f"{k.us:9.1f} {k.count:7.1f} {k.us / k.count:8.2f}  {k.name[:90]} | {k.scope}")
    return "\n".join(lines) + "\n"


def _measure(base: Engine, batch: int, rates: tuple[float, float], output: Path | None):
    """(phase, record) of every part and step at one batch size."""
    phases = Phases(base, batch)
    profiled = {phase: step.without_graphs() for phase, step in phases.steps.items()}
    compile_s = device_steps.compile_all(phases.steps)
    device_steps.compile_all(profiled)
    seconds = device_steps.medians(device_steps.alternate(phases.steps, _STEPS.value))
    # A chunk's tokens choose all there are, or nearly: by chance.
    read = experts_read({p: step for p, step in phases.steps.items() if p != "prefill"})
    for phase, step in profiled.items():
        text = step.compiled.as_text()
        kernels = kernel_trace.record(lambda step=step: step.queue(_PROFILED), _PROFILED, text)
        listed = kernel_trace.over_layers(kernels, base.model)
        if output:
            listing = output / f"kernels-{phase}-batch{batch}.txt"
            listing.write_text(kernel_list(phase, listed), encoding="utf-8")
        print(kernel_list(phase, listed[: _TOP.value]))
        groups, experts = kernel_trace.grouped(kernels, base.model), read.get(phase)
        least = phases.costs[phase](experts_read=experts)
        parts = part_rows(groups, least, rates)
        for row in parts:
            yield phase, row
        counted = step.compiled.cost_analysis() or {}
        yield (
            phase,
            step_row(parts, seconds[phase], cost.total(least), rates)
            | ({} if experts is None else {"experts_read": experts})
            | {"xla_gb": counted.get("bytes accessed", 0.0) / 1e9}
            | {"xla_tflop": counted.get("flops", 0.0) / 1e12, "compile_s": compile_s},
        )
        if phase == "round":
            drafts = [row for row in parts if row["kind"] == "draft"]
            due = cost.total({key: c for key, c in least.items() if key[0] == "draft"})
            rest = max(seconds["round"] - seconds["verify"], 1e-9)
            for row in drafts:
                yield "draft", row
            yield "draft", step_row(drafts, rest, due, rates)


def main() -> int:
    """Runs the benchmark."""
    unknown = set(_PHASES.value) - set(PHASES)
    if unknown:
        raise ValueError(f"--phases: no phase {min(unknown)!r}; there are {', '.join(PHASES)}")
    output = _FLAGS.output and Path(_FLAGS.output)
    if output:
        check_can_draw()
        output.mkdir(parents=True, exist_ok=True)
    # A cached executable may carry the scopes of the source it was first compiled from.
    jax.config.update("jax_enable_compilation_cache", False)
    base = command.load_weights(_FLAGS, "roofline.jsonl")
    for key, usual in (("uniform_rows", 0), ("rounds_per_call", 1)):
        if (value := getattr(base.config.decode, key)) != usual:
            raise ValueError(
                f"decode.{key}={value}: a profile is of one executable that runs one round; set it "
                f"to {usual}"
            )
    records = Records(output and str(output / "roofline.jsonl"), _FLAGS.commit, echo=False)
    rates, rows = measure.ceilings(), []
    for batch in command.whole_numbers("batches", _BATCHES.value):
        for phase, record in _measure(base, batch, rates, output):
            fixed = {
                "bench": "roofline", "model": base.config.model, "dtype": base.config.dtype,
                "global_layers": base.config.cache.global_layers, "phase": phase, "batch": batch,
                "context": _CONTEXT.value, "read_gb_per_s": rates[0] / 1e9,
                "matmul_tflop_per_s": rates[1] / 1e12,
            }  # fmt: skip
            rows.append(fixed | record)
            records.add(**rows[-1])
        gc.collect()  # these caches, before the next are made
    print(roofline_report.tables(rows))
    if output:
        roofline_report.write(output)
    return 0


if __name__ == "__main__":
    command.run(main, _FLAGS, __doc__)
