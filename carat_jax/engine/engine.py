"""The loop: admit, prefill, decode, deliver, release.

The engine is the only holder of mutable state. One call of `step` prefills what the scheduler
allows, runs one decode step for all slots, and delivers the tokens of the step before: the next
step is dispatched before the last one's tokens are read, and what was computed past a stop is
dropped.

If a step raises or is interrupted after its donated state was consumed, the state is built anew and
the samples that were running are prefilled again from the ids they have, which changes none of
their tokens: a draw depends on seed, sample and position alone.
"""

import contextlib
import dataclasses
import functools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from carat_jax.config import Config, SamplingParams
from carat_jax.decoding.drafters import NoDrafter, shortened, sources
from carat_jax.decoding.sampling import LogitsHook
from carat_jax.decoding.state import DecodeState
from carat_jax.decoding.steps import Drawn, Steps, build_steps
from carat_jax.engine.chunks import padded_row, plan_chunks
from carat_jax.engine.compile_ahead import Ahead, compile_missing
from carat_jax.engine.compile_counter import num_cache_hits, num_compilations
from carat_jax.engine.counters import Acceptance, Counters
from carat_jax.engine.delivery import (
    push,
    sampler_kind,
    sampling_row,
    token_info,
    vocabulary_rows,
)
from carat_jax.engine.draft_length import CHOICES, DraftLength
from carat_jax.engine.drafting import Drafting
from carat_jax.engine.limits import Limits
from carat_jax.engine.memory import new_state, reuse_of
from carat_jax.engine.prefixes import NOTHING, Held
from carat_jax.engine.request import Request, Sample, TokenInfo
from carat_jax.engine.scheduler import Admission, Chunk, Scheduler
from carat_jax.engine.shapes import (
    key_rungs,
    max_context,
    prefill_sizes,
    reuses_prefix,
    score_sizes,
    step_options,
    verify_rows,
)
from carat_jax.engine.tokenizer import Tokenizer
from carat_jax.families import ModelConfig
from carat_jax.numerics.padding import padded_keys

# Steps dispatched before the oldest one's tokens are read.
_RUN_AHEAD = 1


_PLAIN = Drafting(NoDrafter())


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatched step whose tokens were not read yet, and whom its rows belong to.

    Without rounds it is the first token of a sample.
    """

    drawn: Drawn
    samples: Mapping[int, Sample]
    num_rounds: int = 0
    num_drafts: int = 0

    def __post_init__(self):
        for leaf in jax.tree.leaves(self.drawn):
            leaf.copy_to_host_async()

    def read(self) -> list[Drawn]:
        """Waits for the step; what it drew, round by round, in one copy."""
        drawn = jax.device_get(self.drawn)
        if self.num_rounds <= 1:
            return [drawn]
        return [jax.tree.map(lambda x, i=i: x[i], drawn) for i in range(self.num_rounds)]


class EngineLoop:
    """Runs requests on one model; `engine.api.Engine` is this with a friendly face.

    Args:
      config: all settings.
      model: the model's facts.
      graph, params: the model, split.
      tokenizer: for texts, end tokens and suppressed tokens.
      hook: a function on the logits, compiled into the samplers.
      drafting: who proposes tokens.
    """

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        graph: nnx.GraphDef,
        params: Any,
        tokenizer: Tokenizer,
        hook: LogitsHook | None = None,
        drafting: Drafting = _PLAIN,
    ):
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.max_context = max_context(config, model)
        self.rungs = key_rungs(config, self.max_context)
        self.drafter, self._drafting = drafting.drafter, drafting
        self._sources = sources(self.drafter)
        self._params = {"target": params, "draft": drafting.params}
        self.options = step_options(config, model)
        self.limits = Limits(model.vocab_size, self.max_context, self.options.num_top)
        base_bias = np.zeros(model.vocab_size, np.float32)
        base_bias[[i for i in tokenizer.suppress_ids if i < model.vocab_size]] = -np.inf
        self.num_rows = verify_rows(config, self.drafter.num_drafts)
        steps = functools.partial(
            build_steps, graph, options=self.options, base_bias=jnp.asarray(base_bias), hook=hook
        )
        self._steps: Steps = steps(drafter=self.drafter)
        is_auto = config.decode.draft_len == "auto" and self.drafter.num_drafts
        self._length = DraftLength(CHOICES if is_auto else (self.drafter.num_drafts,))
        self._rounds: dict[int, Callable] = {
            m: steps(drafter=shortened(self.drafter, m)).round for m in CHOICES[:-1] if is_auto
        } | {self.drafter.num_drafts: self._steps.round}
        sizes = self.rungs, self.max_context
        self._ahead = Ahead(self._steps, self._rounds, self.options, config, *sizes)
        self._flights: deque[_Flight] = deque()
        self._is_busy = False
        self._compiled: set[str] = set()
        self._state: DecodeState | None = self._new_state()
        self._scheduler = Scheduler(
            config.engine.max_batch,
            config.engine.max_queue,
            prefill_sizes(config),
            config.engine.prefill_budget or config.engine.prefill_chunks[-1],
            reuse_of(self._state) if reuses_prefix(config) else None,
        )
        self._cache_bytes = sum(x.nbytes for x in jax.tree.leaves(self._state.bank.layers))
        self.counters = Counters(Acceptance(self.drafter.num_drafts))

    # ---- requests ----------------------------------------------------------------------------

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, is_chat: bool = False
    ) -> Request:
        """Queues a prompt.

        Raises:
          ValueError: the prompt or the parameters cannot be served, or the queue is full.
        """
        self.limits.check(prompt_ids, params)
        room = self.max_context - len(prompt_ids)
        ends = () if params.ignore_eos else self.tokenizer.eos_ids
        request = Request(
            prompt_ids,
            params,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            budget=min(params.max_tokens, room),
            end_ids=frozenset((*ends, *params.stop_token_ids)),
            tokenizer=self.tokenizer,
            is_chat=is_chat,
            num_places=self.drafter.num_drafts,
        )
        self._scheduler.submit(request.samples)
        self.counters.requests += 1
        self.counters.prompt_tokens += len(prompt_ids)
        return request

    def cancel(self, request: Request) -> None:
        """Ends what is left of a request; its slots are free for the next one."""
        for sample in request.samples:
            sample.cancel()
        # The garbage collector drops a forgotten iterator, and so cancels its request, whenever it
        # likes: amid a step too, which then releases the slots itself.
        if not self._is_busy:
            with self._guarded():
                self._release_finished()

    @property
    def room(self) -> int:
        """Samples that `submit` would take now."""
        return self._scheduler.room()

    # ---- the loop ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or is in flight."""
        return self._scheduler.is_idle and not self._flights

    def step(self) -> None:
        """Moves every request on: those that run by a round, the others by their share of it."""
        started, waited = time.perf_counter(), self.counters.wait_seconds
        with self._guarded():
            for chunk in self._scheduler.chunks():
                logits = self._prefill(chunk)
                if chunk.is_last:
                    self._start(chunk.admission, logits)
            if dispatched := self._scheduler.wants_round:
                self._round()
            while len(self._flights) > (_RUN_AHEAD if dispatched else 0):
                self._deliver(self._flights.popleft())
            self._release_finished()
        spent = time.perf_counter() - started
        self.counters.host_seconds += spent - (self.counters.wait_seconds - waited)

    def _prefill(self, chunk: Chunk) -> jax.Array:
        """Adds a chunk to its slot; logits of its last id."""
        self._length.paused()
        admission, slot = chunk.admission, chunk.admission.slots[0]
        if chunk.is_first:
            admission.samples[0].request.start()
            self.counters.prefills += 1
            self.counters.reused_tokens += admission.reused
            if admission.reused:
                self._cut(slot, admission.reused)
        row, num_valid = padded_row(chunk.ids, chunk.size)
        self._state, logits = self._steps.prefill(
            self._params, self._state, row, num_valid, np.full(1, slot, np.int32)
        )
        return logits

    def _start(self, admission: Admission, logits: jax.Array) -> None:
        """Gives every sample its copy of the prefilled slot and its first token."""
        for other in admission.slots[1:]:
            src = np.int32(admission.slots[0])
            self._state = self._steps.fork(self._state, src, np.int32(other))
        for sample, slot in zip(admission.samples, admission.slots, strict=True):
            sample.length = len(admission.ids)
            sample.furthest = max(admission.furthest, sample.length)
            self._set_sampling(slot, sample)
            self._state, drawn = self._steps.first(
                self._state, logits, np.full(1, slot, np.int32), sampler_kind([sample])
            )
            sample.num_dispatched += 1
            self._flights.append(_Flight(drawn, {0: sample}))

    def _set_sampling(self, slot: int, sample: Sample) -> None:
        limit = np.int32(len(sample.request.prompt_ids) + sample.request.budget)
        self._state = self._steps.admit(self._state, np.int32(slot), limit, sampling_row(sample))
        rows = vocabulary_rows(sample, self.model.vocab_size)
        if rows is not None:
            self._state = self._steps.set_rows(self._state, np.int32(slot), *rows)

    def _round(self) -> None:
        running, num_rounds = dict(self._scheduler.running), self.options.rounds_per_call
        wanted = max(s.request.budget - s.num_dispatched for s in running.values())
        length = self._length.choose(most=wanted - 1)
        static = sampler_kind(running.values()), self._num_keys()
        is_full = length == self.drafter.num_drafts
        step = self._steps.round if is_full else self._rounds[length]
        self._state, drawn = step(self._params, self._state, *static)
        for sample in running.values():
            sample.num_dispatched += num_rounds
        self._flights.append(_Flight(drawn, running, num_rounds, length))

    def _num_keys(self) -> int | None:
        """The static key count of the next round; None where lengths are traced."""
        if self.options.compute.is_fused:
            return None
        # A round in flight may commit all its rows.
        ahead = self.options.rounds_per_call
        held = max(
            len(s.known_ids) + (s.num_dispatched - len(s.ids) + ahead) * self.num_rows
            for s in self._scheduler.running.values()
        )
        # What reaches past the context belongs to rows that will be dropped.
        pad = self.config.attention.pad_keys
        return padded_keys(min(held, self.max_context), pad, self.rungs)

    def _deliver(self, flight: _Flight) -> None:
        """Reads one step's tokens and hands them to the samples that still want them."""
        started = time.perf_counter()
        rounds = flight.read()
        now = time.perf_counter()
        self.counters.wait_seconds += now - started
        self.counters.rounds += flight.num_rounds
        if flight.num_rounds:
            self._length.ended(flight.num_drafts, now)
        for drawn in rounds:
            for row, sample in flight.samples.items():
                if flight.num_rounds:
                    counts = int(drawn.num[row]), int(drawn.num_drafts[row])
                    self._count_round(sample, *counts, self._sources[drawn.source[row]])
                before = len(sample.ids)
                for i in range(drawn.num[row]):
                    if not sample.is_finished:
                        push(sample, drawn, row, i)
                self.counters.generated_tokens += len(sample.ids) - before

    def _count_round(self, sample: Sample, num: int, num_drafts: int, drafter: str) -> None:
        """Takes note of what a round did to a sample's slot; 0 tokens if it had stopped there."""
        if num:
            sample.furthest = max(sample.furthest, sample.length + self.drafter.num_drafts + 1)
            sample.length += num
        if num and not sample.is_finished:
            sample.num_dispatched += num - 1
            for acceptance in (self.counters.acceptance, sample.request.acceptance):
                acceptance.count(num - 1, num_drafts, drafter)
            self._length.observe_drafts(num - 1, num_drafts)

    def _release_finished(self) -> None:
        for admission in self._scheduler.drop_finished():
            for slot in admission.slots:
                filled = Held(tuple(admission.ids[: admission.done]), admission.furthest)
                self._release(slot, filled if slot == admission.slots[0] else NOTHING)
        for slot, sample in list(self._scheduler.running.items()):
            if sample.is_finished:
                self._release(slot, self._held(slot, sample))
        if not self._scheduler.running:
            self._flights.clear()

    def _release(self, slot: int, held: Held = NOTHING) -> None:
        self._cut(slot, 0)
        self._scheduler.release(slot, held)

    def _cut(self, slot: int, length: int) -> None:
        """Makes a slot hold its first `length` positions, and decode no more."""
        self._state = self._steps.release(self._state, np.int32(slot), np.int32(length))

    def _held(self, slot: int, sample: Sample) -> Held:
        """What the slot of a finished sample holds."""
        if sample.finish_reason == "error":
            return NOTHING
        ahead = sum(f.num_rounds for f in self._flights if f.samples.get(slot) is sample)
        written = sample.length + ahead * (self.drafter.num_drafts + 1)
        # The last id was drawn, but no step that was read put it into the caches.
        return Held(tuple(sample.known_ids[:-1]), max(sample.furthest, written))

    # ---- scoring -----------------------------------------------------------------------------

    def score_ids(self, ids: Sequence[int], num_top: int = 0) -> list[TokenInfo | None]:
        """Log-probability of each id given those before it; None for the first.

        They are the model's own: no bias, no suppression, no hook.
        """
        self.limits.check_score(ids, num_top)
        while (slot := self._scheduler.take_slot()) is None:
            self.step()
        scored: list[TokenInfo | None] = [None]
        try:
            with self._guarded():
                for start, size in plan_chunks(len(ids), score_sizes(self.config)):
                    chunk, num_valid = padded_row(ids[start : start + size], size)
                    targets, _ = padded_row(ids[start + 1 : start + 1 + size], size)
                    where = np.full(1, slot, np.int32)
                    self._state, told = self._steps.score(
                        self._params, self._state, chunk, num_valid, where, targets
                    )
                    told = jax.device_get(told)
                    scored += [token_info(told, 0, i, num_top) for i in range(int(num_valid[0]))]
        finally:
            with self._guarded():
                self._cut(slot, 0)
            self._scheduler.release(slot)
        return scored[: len(ids)]

    # ---- state -------------------------------------------------------------------------------

    def compile_ahead(self, requests: Iterable[tuple[Sequence[int], SamplingParams]]) -> None:
        """Compiles, side by side, the steps that prompts with these parameters will run."""
        with self._guarded():
            calls = self._ahead.calls(self._params, self._state, requests)
            self.counters.compile_seconds += compile_missing(calls, self._compiled)

    def warm_up(self) -> None:
        """Compiles every declared shape, so that nothing compiles later."""
        with self._guarded():
            calls = self._ahead.declared(self._params, self._state)
            self.counters.compile_seconds += compile_missing(calls, self._compiled)
            # A round may be made of several steps. Those of idle slots change nothing.
            for step, kind, num_keys in self._ahead.rounds():
                self._state, _ = step(self._params, self._state, kind, num_keys)
        # Whatever is too small to be declared compiles when it runs.
        params = SamplingParams(max_tokens=2, repetition_penalty=1.1, n=min(2, self.num_slots))
        self.score_ids([self.tokenizer.bos_id])
        self.run([self.submit([self.tokenizer.bos_id], params)])

    @property
    def num_slots(self) -> int:
        """Samples that run at once."""
        return self.config.engine.max_batch

    def run(self, requests: Sequence[Request]) -> None:
        """Steps until these requests are finished."""
        while not all(request.is_finished for request in requests):
            self.step()

    def stats(self) -> dict[str, Any]:
        """Counters and sizes."""
        return {
            **self.counters.as_dict(),
            "waiting": self._scheduler.num_waiting,
            "prefilling": self._scheduler.num_filling,
            "running": len(self._scheduler.running),
            "compilations": num_compilations(),
            "from_compile_cache": num_cache_hits(),
            "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self._params)),
            "cache_bytes": self._cache_bytes,
            "device": str(jax.devices()[0].device_kind),
        }

    def _new_state(self) -> DecodeState:
        return new_state(self.config, self.model, self._drafting, self.options.compute)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Leaves a usable state behind whatever happens inside, Ctrl-C included."""
        self._is_busy = True
        try:
            if self._state is None:
                self._state = self._new_state()
            yield
        except BaseException:
            # Built anew when it is next needed: a second Ctrl-C finds nothing slow to interrupt.
            self._state = None
            self._flights.clear()
            self._scheduler.restart()
            self.counters.restarts += 1
            raise
        finally:
            self._is_busy = False
