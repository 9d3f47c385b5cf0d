"""`python -m carat_jax.bench.startup --config F`: seconds from the command to the first token.

Starts fresh processes one after the other: the first with an empty compilation cache (cold), the
others with what it left behind (warm). Each does what `generate` does: import, settings and plan,
weights, caches, the compiling of the steps its prompt needs, the first token. Nothing else may use
the device meanwhile. A row a start, with the seconds of each phase, goes to stdout and --output.

    python -m carat_jax.bench.startup --config configs/random-31b.yaml --output startup.jsonl
"""

import json
import os
import subprocess
import sys
import tempfile
import time

from absl import flags

from carat_jax.bench import command

_FLAGS = command.new_flags("File that rows are appended to.")
_own = {"flag_values": _FLAGS}
_PROMPT = flags.DEFINE_integer("prompt", 100, "Tokens of the prompt.", 1, **_own)
_WARM = flags.DEFINE_integer("warm", 2, "Warm starts after the cold one.", 0, **_own)
# When the process was started, by the clock of the machine: what a process is told to measure from.
_STARTED = flags.DEFINE_float("started", None, "Of a process that this program starts.", **_own)


def _start(began: float) -> None:
    """Loads an engine, generates one token, and prints the seconds of each phase as JSON."""
    from carat_jax.config import read_settings, sampling_from
    from carat_jax.engine import api

    marks = {"import_s": time.time()}
    engine = api.load(read_settings(_FLAGS.config, _FLAGS.set))
    marks["load_s"] = time.time()
    ids = [engine.tokenizer.bos_id] * min(_PROMPT.value, engine.loop.max_context - 2)
    params = sampling_from(engine.config.sampling, max_tokens=2, n=1, ignore_eos=True)
    engine.loop.compile_ahead([(ids, params)])
    marks["compile_s"] = time.time()
    before = engine.stats()["compilations"]
    request = engine.loop.submit(ids, params)
    while not request.samples[0].ids:
        engine.loop.step()
    marks["first_token_s"] = time.time()
    phases, last = {}, began
    for name, at in marks.items():
        phases[name], last = at - last, at
    phases |= {f"{name}_s": seconds for name, seconds in engine.stats()["load_seconds"].items()}
    stats = engine.stats()
    print(
        json.dumps(
            {
                "model": engine.config.model,
                "dtype": engine.config.dtype,
                "prompt": len(ids),
                "seconds": last - began,
                **phases,
                "token": request.samples[0].ids[0],
                "compilations": stats["compilations"],
                "from_compile_cache": stats["from_compile_cache"],
                "compiled_late": stats["compilations"] - before,
                "weight_gb": stats["weight_bytes"] / 1e9,
            }
        )
    )


def _measure(cache: str) -> dict:
    """One fresh process that keeps what it compiles below `cache`."""
    call = [sys.executable, "-m", "carat_jax.bench.startup", f"--prompt={_PROMPT.value}"]
    call += [f"--config={_FLAGS.config}"] if _FLAGS.config else []
    call += [f"--set={text}" for text in [*_FLAGS.set, f"engine.compile_cache={cache}"]]
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true"}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    call.append(f"--started={time.time()}")
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, env=env, check=False)
    if done.returncode:
        raise ValueError(f"the start ended with exit code {done.returncode}; see its message above")
    return json.loads(done.stdout.splitlines()[-1])


def _program() -> int:
    if _STARTED.value is not None:
        _start(_STARTED.value)
        return 0
    with tempfile.TemporaryDirectory() as cache:
        found = [_measure(cache) for _ in range(1 + _WARM.value)]
    # Only now: this process would take the device from those that are measured.
    from carat_jax.bench.measure import Records

    records = Records(_FLAGS.output, _FLAGS.commit)
    for number, row in enumerate(found):
        records.add(bench="startup", case="warm" if number else "cold", **row)
    return 0


if __name__ == "__main__":
    command.run(_program, _FLAGS, __doc__)
