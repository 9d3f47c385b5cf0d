"""`python -m carat_jax.bench.record`: a model's whole record on one load of its weights.

Runs the benchmarks of an engine one after the other in one process: loading a large model takes
longer than most of them. One that fails says why, and the others go on. Contexts are 6,000 and
131,072 positions and those of the trace.

    python -m carat_jax.bench.record --config configs/random-31b.yaml --output record
    python -m carat_jax.bench.record --config configs/random-31b.yaml --output record --runs latency

Each run writes to a folder of its own name in --output, as the benchmark alone does.
"""

import gc
import sys
import time
import traceback
from pathlib import Path

from absl import flags

from carat_jax.bench import command, latency, ring_cost, roofline, serving

# The benchmark of each run and what it is told; the profile last, because it keeps nothing cached.
RUNS = {
    "latency": (latency, ("--batches=1,8", "--against=products.impl=xla")),
    "uniform": (latency, ("--set=decode.uniform_rows=4",)),
    "long": (latency, ("--context=131072", "--drafter=none")),
    "long_v_rot": (
        latency, ("--context=131072", "--drafter=none", "--set=cache.global_layers=v_rot")
    ),
    "ring_cost": (ring_cost, ()),
    "serving": (serving, ("--concurrency=4",)),
    "loads": (serving, ("--concurrency=1,2,8", "--requests=24")),
    "roofline": (roofline, ("--batches=1,8",)),
}  # fmt: skip

_FLAGS = command.new_flags("Folder of the runs' folders.")
_RUNS = flags.DEFINE_list("runs", list(RUNS), "What to run, in this order.", flag_values=_FLAGS)


def main() -> int:
    """Runs them; 1 if one failed or found fault."""
    if _FLAGS.output is None:
        raise ValueError("give --output DIR")
    if not _RUNS.value:
        raise ValueError(f"--runs: give one or more of {', '.join(RUNS)}")
    if unknown := [name for name in _RUNS.value if name not in RUNS]:
        raise ValueError(f"--runs: no run {unknown[0]!r}; there are {', '.join(RUNS)}")
    shared = [f"--set={setting}" for setting in _FLAGS.set]
    shared += [
        f"--{name}={_FLAGS[name].value}" for name in ("config", "commit") if _FLAGS[name].value
    ]
    command.load_weights(_FLAGS)  # what is wrong with the settings is said once, and now
    failed = []
    for name in _RUNS.value:
        benchmark, told = RUNS[name]
        folder = Path(_FLAGS.output) / name
        started, is_failed = time.monotonic(), True
        print(f"{name}: {benchmark.__name__} {' '.join(told)}", file=sys.stderr)
        try:
            is_failed = bool(command.call(benchmark, [*shared, *told, f"--output={folder}"]))
        except (flags.Error, ValueError, NotImplementedError, OSError) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
        except Exception:
            traceback.print_exc()
        failed += [name] * is_failed
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
        gc.collect()  # its engines' caches
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    command.run(main, _FLAGS, __doc__)
