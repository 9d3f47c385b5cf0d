"""How the benchmarks measure: chains on the device, medians of alternating rounds, JSON lines.

A figure is the time of a chain of dependent calls divided by its length, so that the host's part
is hidden; the same chain without the call is timed beside it, and both are in the record. Every
record says device, driver, versions, commit and command. Imports jax and the standard library.
"""

import concurrent.futures
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax


def _output(*command: str) -> str:
    """What a program prints, or "" where there is no such program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def environment(commit: str | None = None) -> dict:
    """Device, driver, versions, commit and command of this process, for every record."""
    device = jax.devices()[0]
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    here = str(pathlib.Path(__file__).parent)
    return {
        "device": device.device_kind,
        "driver": driver.splitlines()[0] if driver else "",
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "commit": commit or _output("git", "-C", here, "rev-parse", "HEAD"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }


class Records:
    """Appends JSON lines to a file (or only prints them) with the environment in each."""

    def __init__(self, path: str | None, commit: str | None = None):
        self._environment = environment(commit)
        self._file = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115

    def add(self, **record) -> None:
        """One record, figures rounded to four digits."""
        record = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in record.items()}
        print(json.dumps(record), flush=True)
        if self._file:
            self._file.write(json.dumps(record | self._environment) + "\n")
            self._file.flush()


def median_time(run, *args, rounds: int = 5, calls: int = 8) -> float:
    """Seconds a call: median over rounds of `calls` queued calls and one wait."""
    jax.block_until_ready(run(*args))
    return statistics.median(_round(run, args, calls) for _ in range(rounds))


def _round(run, args, calls):
    start = time.perf_counter()
    for _ in range(calls):
        result = run(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def chained(function, length: int):
    """x -> x + small * function(x, layer's arrays), `length` times, each step its own launch."""

    def run(x, layers):
        for i in range(length):
            step = function(x, *layers[i % len(layers)])
            x = lax.optimization_barrier((x + 1e-3 * step.astype(x.dtype)).astype(x.dtype))
        return x

    return run


def race(variants: dict, x, layers, *, length: int, rounds: int = 5, calls: int = 4) -> dict:
    """Microseconds a call of each variant, alternating A B A B in one process.

    Args:
      variants: name -> function(x, *arrays of a layer) of x's shape.
      x: the array that the chain carries.
      layers: what the calls read: name -> list of tuples of arrays, or one list for all. Together
        they should be larger than the device's cache.
      length: calls in a chain.
      rounds: timed rounds, of which the median is taken.
      calls: queued calls of a chain in a round.

    Returns:
      name -> (gross, net of the empty chain), with "empty" -> (gross, 0.0).
    """
    by_name = isinstance(layers, dict)

    def of(name):
        return layers.get(name, next(iter(layers.values()))) if by_name else layers

    runs = {"empty": lambda x, *_: x} | variants
    lowered = {n: jax.jit(chained(f, length)).lower(x, of(n)) for n, f in runs.items()}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        done = dict(
            zip(lowered, pool.map(lambda low: low.compile(), lowered.values()), strict=True)
        )
    for name, run in done.items():
        jax.block_until_ready(run(x, of(name)))
    times = {name: [] for name in done}
    for _ in range(rounds):
        for name, run in done.items():
            times[name].append(_round(run, (x, of(name)), calls) / length * 1e6)
    gross = {name: statistics.median(ts) for name, ts in times.items()}
    return {name: (t, t - gross["empty"]) for name, t in gross.items()}


def read_bandwidth(gigabytes: int = 4) -> float:
    """Bytes a second of reading a large array once: the ceiling of this run."""
    x = jnp.ones((gigabytes * 2**29,), jnp.bfloat16)
    return x.nbytes / median_time(jax.jit(lambda x: x.max()), x)
