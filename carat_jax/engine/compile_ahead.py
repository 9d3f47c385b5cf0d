"""Compiles the steps that some requests will run before they run, side by side.

Compiled one by one at its first use a step keeps everybody waiting. XLA compiles outside of
Python's lock, so that the steps of a start take about as long as the slowest of them. What is
compiled here is what the engine later calls: `jit` finds it, and nothing compiles twice.
"""

import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from carat_jax.config import Config, SamplingParams
from carat_jax.decoding.state import DecodeState
from carat_jax.decoding.steps import SamplerKind, StepOptions, Steps
from carat_jax.engine.chunks import plan_chunks
from carat_jax.engine.delivery import kind_of
from carat_jax.engine.shapes import prefill_sizes, score_sizes
from carat_jax.numerics.padding import padded_keys

_MOST_THREADS = 8
_KINDS = [SamplerKind(*switches) for switches in itertools.product((False, True), repeat=2)]
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StepCall:
    """A jitted step and arguments of the shapes it will be called with; none is consumed."""

    step: Any
    args: tuple


@dataclasses.dataclass(frozen=True)
class Ahead:
    """The steps of one engine and what decides their shapes.

    Attributes:
      steps: the jitted steps.
      by_length: rounds by their number of drafts.
      options: what they are compiled for.
      config: all settings.
      rungs: key counts of the three-stage path.
      max_context: positions of a slot.
    """

    steps: Steps
    by_length: Mapping[int, Callable]
    options: StepOptions
    config: Config
    rungs: tuple[int, ...]
    max_context: int

    def calls(
        self,
        params: Any,
        state: DecodeState,
        requests: Iterable[tuple[Sequence[int], SamplingParams]],
    ) -> dict[str, StepCall]:
        """What prompts with their sampling parameters will run, by name.

        What a prompt shares with the one before it, or a round with what else happens to run, may
        need one more step, which then compiles at its first use.
        """
        requests = list(requests)
        wanted = [params for _, params in requests]
        long = [(len(ids), p) for ids, p in requests if p.max_tokens > 1]
        together = [kind_of(p for _, p in long)] if long else []
        sizes = set().union(*(self._chunks(len(ids)) for ids, _ in requests))
        keys = set().union(*(self._keys(length, p.max_tokens) for length, p in long))
        kinds = {*together, *(kind_of([p]) for _, p in long)}
        found = self._prompts(params, state, sorted(sizes))
        found |= self._firsts(state, {kind_of([params]) for params in wanted})
        found |= self._rounds(params, state, kinds, keys)
        return found | self._slots(
            state,
            forks=any(p.n > 1 for p in wanted),
            rows=any(p.logit_bias or p.repetition_penalty != 1 for p in wanted),
        )

    def declared(self, params: Any, state: DecodeState) -> dict[str, StepCall]:
        """Every step, by name."""
        sizes, scored = prefill_sizes(self.config), score_sizes(self.config)
        found = self._prompts(params, state, sizes, scored) | self._firsts(state, _KINDS)
        found |= self._rounds(params, state, _KINDS, self._all_keys())
        return found | self._slots(state, forks=True, rows=True)

    def neediest(self, params: Any, state: DecodeState) -> dict[str, StepCall]:
        """The steps that take the most memory, with every sampler feature on, by name."""
        largest, scored = prefill_sizes(self.config)[-1:], score_sizes(self.config)[-1:]
        found, full = self._prompts(params, state, largest, scored), [SamplerKind(True, True)]
        return found | self._rounds(params, state, full, self._all_keys()[-1:])

    def rounds(self) -> Iterator[tuple[Callable, SamplerKind, int | None]]:
        """Every decode step with its static arguments."""
        return itertools.product(self.by_length.values(), _KINDS, self._all_keys())

    def _prompts(
        self, params: Any, state: DecodeState, sizes: Iterable[int], scored: Iterable[int] = ()
    ) -> dict[str, StepCall]:
        one, found = np.zeros(1, np.int32), {}
        for size in sizes:
            args = params, state, np.zeros((1, size), np.int32), one, one
            found[f"prefill {size}"] = StepCall(self.steps.prefill, args)
        for size in scored:
            row = np.zeros((1, size), np.int32)
            found[f"score {size}"] = StepCall(self.steps.score, (params, state, row, one, one, row))
        return found

    def _firsts(self, state: DecodeState, kinds: Iterable[SamplerKind]) -> dict[str, StepCall]:
        logits = jax.ShapeDtypeStruct(state.sampling.bias.shape[1:], jnp.float32)
        args, step = (state, logits, np.zeros(1, np.int32)), self.steps.first
        return {f"first {_words(kind)}": StepCall(step, (*args, kind)) for kind in kinds}

    def _rounds(
        self,
        params: Any,
        state: DecodeState,
        kinds: Iterable[SamplerKind],
        key_counts: Iterable[int | None],
    ) -> dict[str, StepCall]:
        found, num_rows = {}, self.options.uniform_rows
        for num_keys in key_counts:
            some = "" if num_keys is None else f" over {num_keys} keys"
            if num_rows:
                # Such a round is three steps, of which this one has the model in it.
                rows = np.zeros((len(state.tokens), num_rows), np.int32)
                args = (params, state.bank, rows, np.zeros(len(rows), np.int32), num_keys)
                found[f"verify{some}"] = StepCall(self.steps.verify, args)
                continue
            for (length, step), kind in itertools.product(self.by_length.items(), kinds):
                drafts = f" of {length} drafts" if length else ""
                name = f"round{drafts} {_words(kind)}{some}"
                found[name] = StepCall(step, (params, state, kind, num_keys))
        return found

    def _slots(self, state: DecodeState, *, forks: bool, rows: bool) -> dict[str, StepCall]:
        """What moves a slot on without the model."""
        slot, steps, sampler = np.int32(0), self.steps, state.sampling
        fields = {field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)}
        scalars = {k: np.zeros((), x.dtype) for k, x in fields.items() if x.ndim == 1}
        found = {
            "admit": StepCall(steps.admit, (state, slot, slot, scalars)),
            "release": StepCall(steps.release, (state, slot, slot)),
        }
        if forks:
            found["fork"] = StepCall(steps.fork, (state, slot, slot))
        if rows:
            made = (np.zeros(x.shape[1:], x.dtype) for x in (sampler.bias, sampler.seen))
            found["set_rows"] = StepCall(steps.set_rows, (state, slot, *made))
        return found

    def _chunks(self, length: int) -> set[int]:
        """Chunk sizes of a prompt, alone or while others decode."""
        sizes, budget = prefill_sizes(self.config), self.config.engine.prefill_budget
        small = [size for size in sizes if budget is None or size <= budget]
        return {size for some in (sizes, small) for _, size in plan_chunks(length, some)}

    def _all_keys(self) -> tuple[int | None, ...]:
        """Static key counts of rounds; where each length has its own, none is declared."""
        return (None,) if self.options.compute.is_fused else self.rungs

    def _keys(self, length: int, num_tokens: int) -> set[int | None]:
        """Those of the rounds after a prompt."""
        if self.options.compute.is_fused or not self.rungs:
            return set(self._all_keys())
        ahead = 2 * self.options.rounds_per_call * (max(self.by_length) + 1)
        last = min(length + num_tokens + ahead, self.max_context)
        pad = self.config.attention.pad_keys
        low, high = (padded_keys(n, pad, self.rungs) for n in (min(length + 1, last), last))
        return {rung for rung in self.rungs if low <= rung <= high}


def compile_missing(calls: Mapping[str, StepCall], compiled: set[str]) -> float:
    """Compiles the steps that are not among `compiled`, several at a time, and adds them to it.

    Returns:
      The seconds it took.
    """
    calls = {name: call for name, call in calls.items() if name not in compiled}
    if not calls:
        return 0.0
    started, threads = time.monotonic(), min(_MOST_THREADS, os.cpu_count() or 1, len(calls))
    _log.info("compiling %d steps on %d threads: %s", len(calls), threads, ", ".join(calls))
    pool = ThreadPoolExecutor(threads)
    try:
        # Lowering holds Python's lock; the compiler starts with the first step that is through.
        pending = [pool.submit(c.step.lower(*c.args).compile) for c in calls.values()]
        bar = tqdm(total=len(pending), desc="compiling", unit="step", disable=None, leave=False)
        with bar:
            for done in as_completed(pending):
                done.result()
                bar.update()
    finally:
        pool.shutdown(cancel_futures=True)
    compiled.update(calls)
    seconds = time.monotonic() - started
    _log.info("compiled in %.1f s", seconds)
    return seconds


def workspaces(calls: Mapping[str, StepCall]) -> dict[str, int]:
    """Bytes that the compiler says each step takes beside its inputs and outputs, by name."""

    def measure(call: StepCall) -> int:
        return call.step.lower(*call.args).compile().memory_analysis().temp_size_in_bytes

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(calls, pool.map(measure, calls.values()), strict=True))


def _words(kind: SamplerKind) -> str:
    return ("drawn" if kind.draws else "greedy") + (" with logprobs" if kind.logprobs else "")
