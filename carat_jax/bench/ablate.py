"""`python -m carat_jax.bench.ablate --config configs/ablations/*.yaml --output DIR`

What each idea is worth on this machine: every variant of an ablation file runs through the public
engine on the base's weights, raced A B A B against the base in one process, and is held against the
float32 reference. DIR gets `rows.jsonl`, and `NAME.md` and `NAME.png` of each file. A variant that
fails is a row with its reason; what DIR holds already (same settings, code, versions and device)
is not measured again, so that a run that was interrupted goes on where it stopped.
"""

import functools
import gc
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

import carat_jax
from carat_jax.bench import ablation_plan, ablation_report
from carat_jax.bench.ablation_measures import (
    Reference,
    bytes_a_round,
    first_line,
    story_prompts,
    timed,
)
from carat_jax.bench.ablation_plan import Plan, Variant, read_plan
from carat_jax.bench.drawing import check_can_draw
from carat_jax.bench.interrupt import Interrupt, leave
from carat_jax.bench.measure import Records, read_bandwidth
from carat_jax.config import WEIGHT_KEYS
from carat_jax.engine.api import Engine
from carat_jax.engine.compile_counter import num_compilations

_FLAGS = flags.FlagValues()
_own = {"flag_values": _FLAGS}
flags.DEFINE_multi_string("config", [], "Ablation files; more may follow as arguments.", **_own)
flags.DEFINE_multi_string("set", [], "key=value of the base; repeatable.", **_own)
flags.DEFINE_string("output", None, "Folder of the rows, tables and pictures.", **_own)
flags.DEFINE_string("commit", None, "Commit of the code, where there is no git.", **_own)
flags.DEFINE_boolean("help", False, "Print this.", **_own)
_NUMBERS = ("prompt_tokens", "new_tokens", "rounds", "logprobs")
for _name in _NUMBERS:
    flags.DEFINE_integer(_name, None, f"Replaces {_name} of every file's workload.", 0, **_own)

# What must agree for a row to be the same measurement.
_ENVIRONMENT = ("device", "driver", "jax", "jaxlib", "python", "xla_flags", "code")
# A share of the memory that the float32 weights may take beside the model's own.
_ROOM_FOR_REFERENCE = 0.4


class Rows:
    """The rows of an output folder, by key; the last one of a key counts."""

    def __init__(self, path: Path, records: Records):
        self._records: Records = records
        self._by_key: dict[str, dict] = {}
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # a line that an interruption cut short
                continue
            if isinstance(row, dict) and "key" in row:
                self._by_key[row["key"]] = row
        if text and not text.endswith("\n"):
            with open(path, "a", encoding="utf-8") as file:
                file.write("\n")

    def finished(self, key: str) -> bool:
        """Whether this measurement is there and did not fail."""
        return key in self._by_key and not self._by_key[key].get("failed")

    def add(self, **row: Any) -> None:
        """Keeps a row, here and on disk."""
        self._by_key[row["key"]] = self._records.add(**row)

    def of(self, keys: Iterable[str]) -> list[dict]:
        """The rows there are, in the order of `keys`."""
        return [self._by_key[key] for key in keys if key in self._by_key]


class Bench:
    """Engines on shared weights, and what is measured of them."""

    def __init__(
        self, rows: Rows, environment: Mapping[str, Any], interrupt: Interrupt | None = None
    ):
        self.rows, self.interrupt = rows, interrupt or Interrupt()
        self._environment = [environment[name] for name in _ENVIRONMENT]
        self._weights: dict[tuple, Engine] = {}
        self._bases: dict[str, tuple[Engine, dict]] = {}
        self._references: dict[str, Reference] = {}
        self._bandwidth: float | None = None

    def key(self, plan: Plan, variant: Variant) -> str:
        """Of a variant's row: its settings, the base it is raced against, workload, machine."""
        base = {name: value for name, value, _ in plan.base.settings.items()}
        return variant.key(base, plan.workload, self._environment)

    def run(self, plan: Plan) -> None:
        """Measures what is missing of a plan, the base first."""
        for variant in plan.variants:
            key = self.key(plan, variant)
            if self.rows.finished(key):
                _say(f"{plan.name}: {variant.name}: measured before")
                continue
            _say(f"{plan.name}: {variant.name} ...")
            try:
                found = self._measure(plan, variant)
            # Whatever a variant does, out of memory included, the others go on.
            except Exception as error:
                found = {"failed": first_line(error)}
            _say(f"{plan.name}: {variant.name}: {ablation_report.in_words(found)}")
            settings = {name: value for name, value, _ in variant.settings.items()}
            self.rows.add(
                key=key, plan=plan.name, variant=variant.name, config=settings,
                workload=vars(plan.workload), **found,
            )  # fmt: skip
            gc.collect()  # its caches, before the next one makes its own
            self.interrupt.check()

    def _measure(self, plan: Plan, variant: Variant) -> dict[str, Any]:
        tokenizer = self._shared(plan).tokenizer
        prompts = story_prompts(tokenizer, variant.settings, plan.workload)
        base_prompts = story_prompts(tokenizer, plan.base.settings, plan.workload)
        base, base_start = self._base(plan, base_prompts)
        if variant is plan.base:
            engine, start = base, base_start
        else:
            engine, start = _started(self._maker(plan, variant), prompts, plan)
        before, times, base_times = num_compilations(), [], []
        for _ in range(plan.workload.rounds):
            if engine is not base:
                base_times.append(timed(base, base_prompts, plan.workload).seconds_a_token)
            run = timed(engine, prompts, plan.workload)
            times.append(run.seconds_a_token)
        compiled = num_compilations() - before
        seconds = statistics.median(times)
        base_seconds = statistics.median(base_times or times)
        ratios = [beside / one for beside, one in zip(base_times or times, times, strict=True)]
        moved = bytes_a_round(engine, plan.workload) / (seconds * run.accepted)
        return {
            "ms_token": seconds * 1e3,
            "base_ms_token": base_seconds * 1e3,
            "speedup": base_seconds / seconds,
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
            "tokens_s": len(prompts) / seconds,
            "accepted": run.accepted,
            "ms_round": seconds * run.accepted * 1e3,
            "gb_s": moved / 1e9,
            "of_read": moved / self._read(),
            "read_gb_s": self._read() / 1e9,
            "kv_bytes": engine.stats()["cache_bytes"],
            **start,
            "compilations_while_timed": compiled,
            "engine": engine.describe(),
            **self._reference(plan, prompts).compare(engine, prompts, plan.workload),
        }

    def _shared(self, plan: Plan) -> Engine:
        """An engine that holds the weights, its own caches small."""
        config = plan.base.settings.build()
        name = config.model, config.dtype
        if name not in self._weights:
            cache = config.engine.compile_cache
            small = {"max_batch": 1, "max_context": 256, "compile_cache": cache}
            self._weights[name] = carat_jax.load(config.model, dtype=config.dtype, engine=small)
        return self._weights[name]

    def _maker(self, plan: Plan, variant: Variant) -> Callable[[], Engine]:
        """Makes the variant's engine."""
        values = {name: v for name, v, _ in variant.settings.items() if name not in WEIGHT_KEYS}
        return functools.partial(self._shared(plan).variant, **values)

    def _base(self, plan: Plan, prompts: Sequence) -> tuple[Engine, dict]:
        key = self.key(plan, plan.base)
        if key not in self._bases:
            self._bases.clear()  # one base at a time holds caches
            self._bases[key] = _started(self._maker(plan, plan.base), prompts, plan)
        return self._bases[key]

    def _reference(self, plan: Plan, prompts: Sequence) -> Reference:
        config = plan.base.settings.build()
        name = repr((config.model, config.dtype, config.engine, plan.workload, len(prompts)))
        if name not in self._references:
            self._references.clear()
            shared = self._shared(plan)
            # The weights are counted in float32, whatever they are stored in.
            widened = shared.stats()["weight_bytes"] * (2 if config.dtype == "bfloat16" else 1)
            fits = widened < _ROOM_FOR_REFERENCE * _memory()
            sizes = {"engine": config.engine}
            if fits:
                engine, words = shared.variant(**sizes).reference(), "float32"
            else:
                engine = shared.variant(**sizes, attention={"impl": "xla"})
                words = f"plain JAX in {config.dtype}"
            self._references[name] = Reference(engine, words, prompts, plan.workload)
        return self._references[name]

    def _read(self) -> float:
        if self._bandwidth is None:
            self._bandwidth = read_bandwidth(4 if jax.default_backend() == "gpu" else 0.25)
        return self._bandwidth


def _started(make: Callable[[], Engine], prompts: Sequence, plan: Plan) -> tuple[Engine, dict]:
    """An engine with every step compiled, and what that took."""
    before, started = num_compilations(), time.perf_counter()
    engine = make()
    timed(engine, prompts, plan.workload)
    first, started = time.perf_counter() - started, time.perf_counter()
    timed(engine, prompts, plan.workload)
    again = time.perf_counter() - started
    start = {"compile_s": first - again, "compilations": num_compilations() - before}
    return engine, start


def _memory() -> int:
    """Bytes of the device, or of the machine where that is the same."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _read_plans(arguments: Sequence[str]) -> list[Plan]:
    """The plans of a command line, all checked; ValueError if anything cannot be used."""
    try:
        paths = [*_FLAGS(list(arguments))[1:], *_FLAGS.config]
    except flags.Error as error:
        raise ValueError(str(error)) from None
    if _FLAGS.help:
        return []
    if not paths or not _FLAGS.output:
        raise ValueError("give --config FILE.yaml ... and --output DIR")
    # A name is that of its table and picture.
    twice = Counter(Path(path).stem for path in paths)
    if names := [name for name, count in twice.items() if count > 1]:
        raise ValueError(f"--config: {names[0]}.yaml is given twice; use an --output for each")
    check_can_draw()
    backend = "gpu" if jax.default_backend() == "gpu" else "cpu"
    numbers = {name: _FLAGS[name].value for name in _NUMBERS if _FLAGS[name].value is not None}
    plans = [read_plan(path, _FLAGS.set, backend, numbers) for path in sorted(paths)]
    # Those that share a workload and a base follow each other, so that each base compiles once.
    return sorted(plans, key=lambda plan: (repr(plan.workload), plan.base.key()))


def main(arguments: Sequence[str]) -> int:
    """Runs the program; returns 2 for input that cannot be used, 1 where a file gave nothing."""
    try:
        plans = _read_plans(arguments)
        if _FLAGS.help:
            print(__doc__, ablation_plan.__doc__, _FLAGS.get_help(), sep="\n")
            return 0
        output = Path(_FLAGS.output)
        output.mkdir(parents=True, exist_ok=True)
        records = Records(str(output / "rows.jsonl"), _FLAGS.commit, echo=False)
        rows = Rows(output / "rows.jsonl", records)
    except OSError as error:
        _say(f"error: --output {_FLAGS.output}: {error.strerror}; give a folder to write to")
        return 2
    except ValueError as error:
        _say(f"error: {error}")
        return 2
    with Interrupt() as interrupt:
        return _run(plans, Bench(rows, records.environment, interrupt), output)


def _run(plans: Sequence[Plan], bench: Bench, output: Path) -> int:
    """Measures and reports each plan; 1 if one gave nothing or could not be written."""
    has_failed = False
    for plan in plans:
        try:
            if not bench.interrupt.happened:
                bench.run(plan)
        except KeyboardInterrupt:
            _say("interrupted: the same command goes on from here")
        found = bench.rows.of(bench.key(plan, variant) for variant in plan.variants)
        has_failed |= bool(found) and all(row.get("failed") for row in found)
        try:
            if found:
                print(ablation_report.write(output, plan, found), flush=True)
        except OSError as error:
            _say(f"error: {plan.name}: {error}")
            has_failed = True
        except KeyboardInterrupt:
            _say("interrupted: the same command draws it again")
    if bench.interrupt.happened:
        leave()
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
