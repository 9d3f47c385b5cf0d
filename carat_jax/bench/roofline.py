"""`python -m carat_jax.bench.roofline`: where the time of each phase goes.

Profiles the engine's own executables over caches that hold `--context` positions: a chunk of
prefill, plain decoding, and the round of the drafter (draft, verify, accept). Kernels are added up
by layer kind and part, and their sum stands beside the time of the queued step, which no profile
tells: what is missing is launches and gaps.

    python -m carat_jax.bench.roofline --config configs/random-31b.yaml --context 6000
"""

import sys

from absl import app, flags

import carat_jax
from carat_jax.bench import device_steps, kernel_trace
from carat_jax.bench.measure import Records, read_bandwidth
from carat_jax.config import read_settings

_CONFIG = flags.DEFINE_string("config", None, "YAML settings.")
_SET = flags.DEFINE_multi_string("set", [], "key=value; repeatable.")
_CONTEXT = flags.DEFINE_integer("context", 6000, "Positions each slot holds.")
_BATCH = flags.DEFINE_integer("batch", 1, "Slots that decode.")
_CHUNK = flags.DEFINE_integer("chunk", 2048, "Positions of the prefill chunk.")
_DRAFTER = flags.DEFINE_string("drafter", "assistant", "Drafter of the round.")
_DRAFT_LEN = flags.DEFINE_integer("draft_len", 3, "Drafts of a round.")
_PHASES = flags.DEFINE_list("phases", ["decode", "round", "prefill"], "What to profile.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps queued between two readings of the clock.")
_TOP = flags.DEFINE_integer("top", 40, "Kernels printed, by total time.")
_OUTPUT = flags.DEFINE_string("output", None, "File that JSON lines are appended to.")
_COMMIT = flags.DEFINE_string("commit", None, "Commit of the code, where there is no git.")

# Steps under the profiler: their average has no launch jitter in it, one would do.
_PROFILED = 3


def _phases(engine: carat_jax.Engine) -> dict[str, device_steps.DeviceStep]:
    sizes = {"max_batch": _BATCH.value, "max_context": _CONTEXT.value + device_steps.ROOM}
    plain = engine.variant(engine=sizes, decode={"drafter": "none"})
    steps = {}
    for phase in _PHASES.value:
        if phase == "round":
            drafted = {"drafter": _DRAFTER.value, "draft_len": _DRAFT_LEN.value}
            other = plain.variant(decode=drafted)
            steps[phase] = device_steps.whole_round(device_steps.filled(other, _CONTEXT.value))
        elif phase == "decode":
            steps[phase] = device_steps.whole_round(device_steps.filled(plain, _CONTEXT.value))
        elif phase == "prefill":
            before = max(0, _CONTEXT.value - _CHUNK.value)
            other = plain.variant()
            steps[phase] = device_steps.prefill(device_steps.filled(other, before), _CHUNK.value)
        else:
            raise ValueError(f"--phases: no phase {phase!r}; there are decode, round and prefill")
    return steps


def _print_kernels(phase: str, kernels: list[kernel_trace.Kernel]) -> None:
    print(f"\n{phase}: the longest kernels of a step\n  us/step   count  mean us  kernel | scope")
    for k in kernels[: _TOP.value]:
        name = k.name if k.op.replace(".", "_") == k.name else f"{k.name} ({k.op})"
        print(f"{k.us:9.1f} {k.count:7.1f} {k.us / k.count:8.2f}  {name[:90]} | {k.scope}")


def _print_groups(phase: str, groups: dict, step_us: float) -> None:
    total = sum(us for _, us in groups.values())
    print(f"\n{phase}: a step of {step_us:.1f} us, kernels {total:.1f} us")
    print("  us/step  share   count  kind, part")
    for (kind, part), (count, us) in groups.items():
        print(f"{us:9.1f} {us / total:6.1%} {count:7.1f}  {kind}, {part}")


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        # The base engine only holds the weights: its own caches are kept small.
        small = [*_SET.value, "engine.max_batch=1", "engine.max_context=256"]
        engine = carat_jax.load(read_settings(_CONFIG.value, small))
        steps = _phases(engine)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    records = Records(_OUTPUT.value, _COMMIT.value)
    compile_s = device_steps.compile_all(steps)
    seconds = device_steps.medians(device_steps.alternate(steps, _STEPS.value))
    bandwidth = read_bandwidth()
    model = engine.model
    for phase, step in steps.items():
        text = step.compiled.as_text()
        kernels = kernel_trace.record(lambda step=step: step.queue(_PROFILED), _PROFILED, text)
        groups = kernel_trace.grouped(kernels, model)
        _print_kernels(phase, kernels)
        _print_groups(phase, groups, seconds[phase] * 1e6)
        fixed = {
            "bench": "roofline", "model": engine.config.model, "phase": phase,
            "batch": _BATCH.value, "context": _CONTEXT.value,
        }  # fmt: skip
        for (kind, part), (count, us) in groups.items():
            records.add(**fixed, kind=kind, part=part, kernels=count, us=us)
        records.add(
            **fixed, kind="step", us=seconds[phase] * 1e6,
            kernels=sum(k.count for k in kernels), kernels_us=sum(k.us for k in kernels),
            read_gb_s=bandwidth / 1e9, compile_s=compile_s,
        )  # fmt: skip


if __name__ == "__main__":
    app.run(main)
