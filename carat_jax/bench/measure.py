"""How the benchmarks measure: chains on the device, medians of alternating rounds, JSON lines.

A figure is the time of a chain of dependent calls divided by its length, so that the host's part
is hidden; the same chain without the call is timed beside it, and both are in the record. Every
record says device, driver, versions, commit and command.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import lax

import carat_jax
import pallas_kernels

EMPTY_LENGTH = 480


def _output(*command: str) -> str:
    """What a program prints, or "" where there is no such program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _processor() -> str:
    """The name of the CPU and how many of it there are."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"cpu, {os.cpu_count()} x {name}"


@functools.cache
def _code() -> str:
    """A short hash of the sources and of `tiny`: a commit does not tell of edits that it lacks."""
    digest = hashlib.sha256()
    folders = [pathlib.Path(package.__file__).parent for package in (carat_jax, pallas_kernels)]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    weights = sorted((folders[0] / "tiny").rglob("*.safetensors"))
    for path in [*files, *weights]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _commit() -> str:
    """HEAD of the repository that holds this very file, or "" where none does."""
    git = "git", "-C", str(pathlib.Path(__file__).parent)
    is_ours = _output(*git, "ls-files", pathlib.Path(__file__).name)
    return _output(*git, "rev-parse", "HEAD") if is_ours else ""


def environment(commit: str | None = None) -> dict:
    """Device, driver, versions, commit, code and command of this process, for every record."""
    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else _processor()
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": kind,
        "driver": driver.splitlines()[0] if driver else "",
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": commit or _commit(),
        "code": _code(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }


class Records:
    """Appends JSON lines to a file, with the environment in each, and prints them (`echo`)."""

    def __init__(self, path: str | None, commit: str | None = None, echo: bool = True):
        self.environment, self._echo = environment(commit), echo
        self._file = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115

    def add(self, **record) -> dict:
        """One record, figures rounded to four digits; returns it as it is in the file."""
        record = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in record.items()}
        if self._echo:
            print(json.dumps(record), flush=True)
        if self._file:
            self._file.write(json.dumps(record | self.environment) + "\n")
            self._file.flush()
        return record | self.environment


def origin(rows: Iterable[Mapping[str, Any]]) -> str:
    """Which model, device, versions and commit records were measured with: a line of Markdown."""
    keys, rows = ("model", "dtype", "device", "driver", "jax", "commit"), list(rows)
    found = {key: sorted({str(row.get(key, "")) for row in rows}) for key in keys}
    return ", ".join(f"{key} {' / '.join(values)}" for key, values in found.items()) + "\n"


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


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds a call, gross and net of the empty chain, and one call's output."""

    gross: float
    net: float
    output: jax.Array


def race(variants: dict, x, layers: dict, *, length: int, rounds: int = 5, calls: int = 8) -> dict:
    """Times variants, alternating A B A B in one process.

    Args:
      variants: name -> function(x, *arrays of a layer) of x's shape.
      x: the array that the chain carries.
      layers: name -> list of tuples of arrays that the calls read in turn; together they should be
        larger than the device's cache.
      length: calls in a chain. The empty chain has a length of its own, so that it too hides the
        host; otherwise it would subtract more than the launches that it stands for.
      rounds: timed rounds, of which the median is taken.
      calls: queued calls of a chain in a round.

    Returns:
      name -> Timing, with "empty" among the names.
    """
    layers = {"empty": next(iter(layers.values()))} | layers
    runs = {"empty": lambda x, *_: x} | variants
    lengths = dict.fromkeys(runs, length) | {"empty": EMPTY_LENGTH}
    lowered = {}
    for name, run in runs.items():
        lowered[name] = jax.jit(chained(run, lengths[name])).lower(x, layers[name])
        lowered[name, "once"] = jax.jit(run).lower(x, *layers[name][0])
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        done = dict(
            zip(lowered, pool.map(lambda low: low.compile(), lowered.values()), strict=True)
        )
    outputs = {name: done[name, "once"](x, *layers[name][0]) for name in runs}
    for name in runs:
        jax.block_until_ready(done[name](x, layers[name]))
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name in runs:
            seconds = _round(done[name], (x, layers[name]), calls)
            times[name].append(seconds / lengths[name] * 1e6)
    gross = {name: statistics.median(ts) for name, ts in times.items()}
    return {n: Timing(t, t - gross["empty"], outputs[n]) for n, t in gross.items()}


def read_bandwidth(gigabytes: float = 4) -> float:
    """Bytes a second of reading a large array once: the ceiling of this run."""
    x = jnp.ones((int(gigabytes * 2**29),), jnp.bfloat16)
    return x.nbytes / median_time(jax.jit(lambda x: x.max()), x)


def matmul_rate(size: int = 8192) -> float:
    """Operations a second of a bfloat16 product, the better of two shapes: the other ceiling."""

    def rate(columns: int) -> float:
        x, y = (
            jax.random.normal(jax.random.key(0), (size, n), jnp.bfloat16) for n in (size, columns)
        )
        return 2 * size**2 * columns / median_time(jax.jit(jnp.matmul), x, y)

    # A square one may fill its last wave of tiles badly, or find a slower kernel.
    return max(rate(size), rate(4 * size))


def ceilings() -> tuple[float, float]:
    """Bytes and operations a second that this device reaches in this run."""
    if jax.default_backend() == "cpu":
        return read_bandwidth(0.25), matmul_rate(512)
    return read_bandwidth(), matmul_rate()
