"""The loop: admit, prefill, decode, deliver, release.

The engine is the only holder of mutable state. One call of `step` admits what fits, runs one
decode step for all slots, and delivers the tokens of the step before: the next step is dispatched
before the last one's tokens are read, and what was computed past a stop is dropped.

If a step raises or is interrupted after its donated state was consumed, the state is built anew and
the samples that were running are prefilled again from the ids they have, which changes none of
their tokens: a draw depends on seed, sample and position alone.
"""

import contextlib
import dataclasses
import functools
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from carat_jax.cache import bank as banks
from carat_jax.config import Config, SamplingParams, sampling_from
from carat_jax.decoding.drafters import NoDrafter, shortened
from carat_jax.decoding.sampling import LogitsHook
from carat_jax.decoding.state import DecodeState, empty_state
from carat_jax.decoding.steps import Drawn, SamplerKind, StepOptions, Steps, build_steps
from carat_jax.engine.compile_counter import num_compilations
from carat_jax.engine.counters import Acceptance, Counters
from carat_jax.engine.draft_length import CHOICES, DraftLength
from carat_jax.engine.drafting import Drafting
from carat_jax.engine.limits import Limits
from carat_jax.engine.request import Request, Sample, TokenInfo
from carat_jax.engine.scheduler import Admission, Scheduler
from carat_jax.engine.shapes import (
    compute_options,
    key_rungs,
    max_context,
    padded_row,
    plan_chunks,
)
from carat_jax.engine.tokenizer import Tokenizer
from carat_jax.families import ModelConfig
from carat_jax.numerics.padding import padded_keys

# Alternatives a sampler with log-probabilities returns, at most.
MAX_TOP_LOGPROBS = 20
# Steps dispatched before the oldest one's tokens are read.
_RUN_AHEAD = 1


_PLAIN = Drafting(NoDrafter())


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatched step whose tokens were not read yet, and whom its rows belong to."""

    drawn: Drawn
    samples: Mapping[int, Sample]
    is_round: bool
    num_drafts: int = 0


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
        self._params = {"target": params, "draft": drafting.params}
        num_top = min(MAX_TOP_LOGPROBS, model.vocab_size)
        self.limits = Limits(model.vocab_size, self.max_context, num_top)
        base_bias = np.zeros(model.vocab_size, np.float32)
        base_bias[[i for i in tokenizer.suppress_ids if i < model.vocab_size]] = -np.inf
        self.options = StepOptions(
            compute=compute_options(config),
            num_top=num_top,
            uniform_rows=config.decode.uniform_rows,
            simulate_acceptance=config.decode.simulate_acceptance,
        )
        self.num_rows = max(self.drafter.num_drafts + 1, config.decode.uniform_rows)
        steps = functools.partial(
            build_steps, graph, options=self.options, base_bias=jnp.asarray(base_bias), hook=hook
        )
        self._steps: Steps = steps(drafter=self.drafter)
        self._shorter_rounds: dict[int, Callable] = {}
        self._length: DraftLength | None = None
        if config.decode.draft_len == "auto" and self.drafter.num_drafts:
            self._length = DraftLength()
            for m in CHOICES[:-1]:
                self._shorter_rounds[m] = steps(drafter=shortened(self.drafter, m)).round
        self._last_round: tuple[int, float] | None = None
        self._scheduler = Scheduler(config.engine.max_batch, config.engine.max_queue)
        self._flights: deque[_Flight] = deque()
        self._is_busy = False
        self._state: DecodeState | None = self._new_state()
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
                self._scheduler.drop_finished()
                self._release_finished()

    @property
    def room(self) -> int:
        """Samples that `submit` would take now."""
        return self._scheduler.room()

    # ---- the loop ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or is in flight."""
        return not (self._scheduler.num_waiting or self._scheduler.running or self._flights)

    def step(self) -> None:
        """Moves every request on by about one token."""
        with self._guarded():
            self._scheduler.drop_finished()
            while (admission := self._scheduler.admit()) is not None:
                self._start(admission)
            running = self._scheduler.running
            dispatched = any(sample.wants_more for sample in running.values())
            if dispatched:
                self._round()
            while len(self._flights) > (_RUN_AHEAD if dispatched else 0):
                self._deliver(self._flights.popleft())
            self._release_finished()

    def _start(self, admission: Admission) -> None:
        """Prefills a prompt once and gives every sample its copy and its first token."""
        self._last_round = None  # the next round is not the only work since the last one
        slot, request = admission.slots[0], admission.samples[0].request
        request.start()
        logits = self._prefill(slot, admission.samples[0].known_ids)
        for other in admission.slots[1:]:
            self._state = self._steps.fork(self._state, np.int32(slot), np.int32(other))
        for sample, own in zip(admission.samples, admission.slots, strict=True):
            self._set_sampling(own, sample)
            kind = _sampler_kind([sample])
            self._state, drawn = self._steps.first(
                self._state, logits, np.full(1, own, np.int32), kind
            )
            sample.num_dispatched += 1
            self._flights.append(_Flight(drawn, {0: sample}, is_round=False))

    def _prefill(self, slot: int, ids: Sequence[int]) -> jax.Array:
        """Fills a free slot with `ids` in compiled chunk sizes; logits of the last id."""
        self.counters.prefills += 1
        logits = None
        for start, size in plan_chunks(len(ids), self.config.engine.prefill_chunks):
            chunk, num_valid = padded_row(ids[start : start + size], size)
            self._state, logits = self._steps.prefill(
                self._params, self._state, chunk, num_valid, np.full(1, slot, np.int32)
            )
        return logits

    def _set_sampling(self, slot: int, sample: Sample) -> None:
        params = sample.request.params
        row = {
            "temperature": np.float32(params.temperature),
            "top_k": np.int32(params.top_k),
            "top_p": np.float32(params.top_p),
            "min_p": np.float32(params.min_p),
            "repetition_penalty": np.float32(params.repetition_penalty),
            "seed": np.uint32(sample.request.seed),
            "sample": np.int32(sample.index),
        }
        self._state = self._steps.admit(self._state, np.int32(slot), row)
        if params.logit_bias or params.repetition_penalty != 1:
            bias = np.zeros(self.model.vocab_size, np.float32)
            for token, value in params.logit_bias:
                bias[token] = value
            seen = np.zeros(self.model.vocab_size, bool)
            seen[sample.known_ids] = True
            self._state = self._steps.set_rows(self._state, np.int32(slot), bias, seen)

    def _round(self) -> None:
        running = dict(self._scheduler.running)
        kind, length = _sampler_kind(running.values()), self.drafter.num_drafts
        if self._length is not None:
            wanted = max(s.request.budget - s.num_dispatched for s in running.values())
            length = self._length.choose(most=wanted - 1)
        step = self._shorter_rounds.get(length, self._steps.round)
        self._state, drawn = step(self._params, self._state, kind, self._num_keys())
        for sample in running.values():
            sample.num_dispatched += 1
        self._flights.append(_Flight(drawn, running, is_round=True, num_drafts=length))

    def _num_keys(self) -> int | None:
        """The static key count of the next round; None where lengths are traced."""
        if self.options.compute.is_fused:
            return None
        # A round in flight may commit all its rows.
        held = max(
            len(sample.known_ids) + (sample.num_dispatched - len(sample.ids) + 1) * self.num_rows
            for sample in self._scheduler.running.values()
        )
        # What reaches past the context belongs to rows that will be dropped.
        pad = self.config.attention.pad_keys
        return padded_keys(min(held, self.max_context), pad, self.rungs)

    def _deliver(self, flight: _Flight) -> None:
        """Reads one step's tokens and hands them to the samples that still want them."""
        drawn = jax.device_get(flight.drawn)
        if flight.is_round:
            self._note_cost(flight.num_drafts)
        for row, sample in flight.samples.items():
            if sample.is_finished:
                continue
            before = len(sample.ids)
            for i in range(drawn.num[row]):
                if not sample.is_finished:
                    _push(sample, drawn, row, i)
            sample.num_dispatched += int(drawn.num[row]) - 1
            self.counters.generated_tokens += len(sample.ids) - before
            if flight.is_round:
                counts = int(drawn.num[row]) - 1, int(drawn.num_drafts[row])
                self.counters.acceptance.count(*counts)
                sample.request.acceptance.count(*counts)
                if self._length is not None:
                    self._length.observe_drafts(*counts)
        self.counters.rounds += flight.is_round

    def _note_cost(self, length: int) -> None:
        """A round ended; right after one of the same length, the time between is what it costs."""
        now = time.perf_counter()
        if self._length is not None and self._last_round and self._last_round[0] == length:
            self._length.observe_cost(length, now - self._last_round[1])
        self._last_round = length, now

    def _release_finished(self) -> None:
        for slot, sample in list(self._scheduler.running.items()):
            if sample.is_finished:
                self._state = self._steps.release(self._state, np.int32(slot))
                self._scheduler.release(slot)
        if not self._scheduler.running:
            self._flights.clear()

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
                for start, size in plan_chunks(len(ids), self.config.engine.prefill_chunks):
                    chunk, num_valid = padded_row(ids[start : start + size], size)
                    targets, _ = padded_row(ids[start + 1 : start + 1 + size], size)
                    where = np.full(1, slot, np.int32)
                    self._state, told = self._steps.score(
                        self._params, self._state, chunk, num_valid, where, targets
                    )
                    told = jax.device_get(told)
                    scored += [_info(told, 0, i, num_top) for i in range(int(num_valid[0]))]
        finally:
            with self._guarded():
                self._state = self._steps.release(self._state, np.int32(slot))
            self._scheduler.release(slot)
        return scored[: len(ids)]

    # ---- state -------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compiles every declared shape, so that nothing compiles later."""
        longest = max(1, self.max_context - 2)
        params = sampling_from(SamplingParams(temperature=0.0, max_tokens=2), ignore_eos=True)
        for size in self.config.engine.prefill_chunks:
            ids = [self.tokenizer.bos_id] * min(size, longest)
            self.score_ids(ids)
            self.run([self.submit(ids, params)])
        kinds = [
            {"temperature": temperature, "logprobs": logprobs, "n": min(2, self.num_slots)}
            for temperature in (0.0, 1.0)
            for logprobs in (None, 0)
        ]
        # Only the three-stage path has rounds that depend on how many keys there are.
        held = (len(ids),) if self.options.compute.is_fused else self.rungs
        lengths = (*self._shorter_rounds, self.drafter.num_drafts)
        for length, num_keys in itertools.product(lengths, held):
            if self._length is not None:
                self._length = DraftLength((length,))
            ids = [self.tokenizer.bos_id] * min(max(1, num_keys - self.num_rows), longest)
            for kind in (*kinds, {"repetition_penalty": 1.1}):
                self.run([self.submit(ids, sampling_from(params, **kind))])
        if self._length is not None:
            self._length = DraftLength()

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
            "running": len(self._scheduler.running),
            "compilations": num_compilations(),
            "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self._params)),
            "cache_bytes": self._cache_bytes,
            "device": str(jax.devices()[0].device_kind),
        }

    def _new_state(self) -> DecodeState:
        dtype = jnp.dtype(self.config.dtype)
        bank = banks.empty_bank(
            self.model,
            self.num_slots,
            self.max_context,
            self.num_rows,
            dtype,
            banks.CacheKinds(
                self.config.cache.local_layers,
                self.config.cache.global_layers,
                block=self.options.compute.ring_block,
            ),
        )
        draft = self._drafting.new_state(self.num_slots, self.max_context, self.num_rows)
        return empty_state(bank, self.model, self.max_context, dtype, draft)

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


def _sampler_kind(samples) -> SamplerKind:
    params = [sample.request.params for sample in samples]
    return SamplerKind(
        draws=any(p.temperature > 0 or p.repetition_penalty != 1 for p in params),
        logprobs=any(p.logprobs is not None for p in params),
    )


def _push(sample: Sample, drawn: Drawn, row: int, i: int) -> None:
    token, num_top = int(drawn.tokens[row, i]), sample.request.params.logprobs
    if token < 0:
        place = len(sample.known_ids)
        sample.cancel("error")
        raise FloatingPointError(
            f"the logits of position {place} are NaN or leave no token (a hook? an overflow?)"
        )
    sample.push(token, None if num_top is None else _info(drawn, row, i, num_top))


def _info(drawn: Drawn, row: int, i: int, num_top: int) -> TokenInfo:
    ids, logprobs = drawn.top_ids[row, i, :num_top], drawn.top_logprobs[row, i, :num_top]
    top = tuple((int(token), float(p)) for token, p in zip(ids, logprobs, strict=True))
    return TokenInfo(float(drawn.logprobs[row, i]), top)
