"""Who proposes tokens. Correctness never depends on a drafter: every proposal is verified.

A drafter is a frozen object of pure functions. What it needs at run time it gets as arguments: its
parameters, its own state (a pytree with slots on the first axis, or empty), the target model and
the decode state. It proposes up to `num_drafts` tokens a slot in fixed shapes, and says how many
are real.
"""

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from carat_jax.array_types import Array, Float, Int, Lengths, Slots, Tokens
from carat_jax.cache.bank import CacheBank
from carat_jax.decoding.sampling import (
    DRAFT,
    LogitsHook,
    allowed_logits,
    drawing_logits,
    noise,
)
from carat_jax.decoding.state import DecodeState
from carat_jax.model.assistant import draft, target_views
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import merge
from carat_jax.numerics.options import ComputeOptions


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "num", "logits", "source"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Proposal:
    """Drafted tokens.

    Attributes:
      tokens: `[B, M]`.
      num: how many of each slot's are real, the first ones, `[B]`.
      logits: the law each was drawn from, or None where each is a point mass.
      source: whose each slot's are, an index into `sources` of the drafter; None is 0.
    """

    tokens: Int[Array, "B M"]
    num: Int[Array, "B"]
    logits: Float[Array, "B M V"] | None = None
    source: Int[Array, "B"] | None = None

    def rows(self, state: DecodeState, at_least: int = 0) -> tuple[Tokens, Lengths]:
        """What a round's pass takes: each slot's last token and drafts, and how many are real.

        Padded to `at_least` rows; a slot that does not decode has no real ones.
        """
        num_valid = jnp.where(state.is_active, 1 + self.num, 0)
        tokens = jnp.concatenate([state.tokens[:, None], self.tokens], axis=1)
        pad = max(0, at_least - tokens.shape[1])
        return jnp.pad(tokens, ((0, 0), (0, pad))), num_valid


@runtime_checkable
class Drafter(Protocol):
    """What a round asks of a drafter; see the module docstring."""

    name: str
    num_drafts: int

    def propose(
        self, params: Any, own: Any, target: Gemma4, state: DecodeState
    ) -> tuple[Proposal, Any]:
        """Drafts for every slot, from tokens and lengths as they are before the round."""

    def commit(self, own: Any, lengths: Lengths) -> Any:
        """Its state once the target holds `lengths` positions."""

    def prefill(
        self, params: Any, own: Any, tokens: Tokens, num_valid: Lengths, slot: Slots
    ) -> Any:
        """Its state after a chunk of one slot's prompt."""


def shortened(drafter: Drafter, num_drafts: int) -> Drafter:
    """The same drafter with another M; its parameters and state stay what they are."""
    if num_drafts == 0 and isinstance(drafter, Stateless):
        return NoDrafter()
    if isinstance(drafter, CombinedDrafter):
        parts = (shortened(part, num_drafts) for part in (drafter.ngram, drafter.assistant))
        return CombinedDrafter(*parts)
    return dataclasses.replace(drafter, num_drafts=num_drafts)


def sources(drafter: Drafter) -> tuple[str, ...]:
    """Names of those whose tokens a drafter passes on: its own, unless it combines others."""
    if isinstance(drafter, CombinedDrafter):
        return drafter.ngram.name, drafter.assistant.name
    return (drafter.name,)


class Stateless:
    """A drafter that keeps nothing of its own."""

    def commit(self, own: Any, lengths: Lengths) -> Any:
        """Keeps nothing."""
        return own

    def prefill(
        self, params: Any, own: Any, tokens: Tokens, num_valid: Lengths, slot: Slots
    ) -> Any:
        """Keeps nothing."""
        return own


@dataclasses.dataclass(frozen=True)
class NoDrafter(Stateless):
    """Nothing is drafted: a round is plain decoding."""

    name: str = "none"
    num_drafts: int = 0

    def propose(
        self, params: Any, own: Any, target: Gemma4, state: DecodeState
    ) -> tuple[Proposal, Any]:
        """No tokens."""
        num_slots = state.tokens.shape[0]
        nothing = jnp.zeros((num_slots, 0), jnp.int32)
        return Proposal(nothing, jnp.zeros(num_slots, jnp.int32)), own


@dataclasses.dataclass(frozen=True)
class NgramDrafter(Stateless):
    """Prompt lookup (Saxena 2023): what followed the last tokens when they last occurred.

    Runs on the device over the ids of prompt and output, so that the loop need not wait for the
    host to see the last tokens. The longest suffix that occurred before wins, of its occurrences
    the latest.

    Attributes:
      num_drafts: M.
      longest, shortest: lengths of the suffix looked for, in tokens.
    """

    num_drafts: int
    longest: int = 4
    shortest: int = 2
    name: str = "ngram"

    def propose(
        self, params: Any, own: Any, target: Gemma4, state: DecodeState
    ) -> tuple[Proposal, Any]:
        """The tokens after the latest earlier occurrence of the suffix; none without a match."""
        known = state.bank.lengths + 1  # the last token is not in the caches yet
        tokens, num = look_up(state.ids, known, self.num_drafts, self.longest, self.shortest)
        return Proposal(tokens, num), own


def look_up(
    ids: Int[Array, "B S"], known: Lengths, num_drafts: int, longest: int, shortest: int
) -> tuple[Int[Array, "B M"], Int[Array, "B"]]:
    """What followed each row's last tokens where they last occurred before.

    Args:
      ids: known ids of each row, from the left.
      known: how many there are.
      num_drafts: M, tokens to return.
      longest, shortest: lengths of the suffix looked for.

    Returns:
      Up to M tokens after the latest of the longest matches, and how many of them are known ids.
    """
    capacity = ids.shape[1]
    place = jnp.arange(capacity)
    # matched[b, e]: how many ids before place e agree with those before the end.
    matched = jnp.zeros(ids.shape, jnp.int32)
    agrees = jnp.ones(ids.shape, bool)
    for back in range(1, longest + 1):
        last = jnp.take_along_axis(ids, jnp.maximum(known - back, 0)[:, None], axis=1)
        agrees &= (jnp.roll(ids, back, axis=1) == last) & (place >= back)
        agrees &= (known >= back)[:, None]
        matched += agrees
    # Something must have followed: the place lies before the end.
    usable = (place < known[:, None]) & (matched >= shortest)
    rank = jnp.where(usable, matched * capacity + place, -1)
    found = jnp.argmax(rank, axis=1)
    has_match = jnp.max(rank, axis=1) >= 0
    places = found[:, None] + jnp.arange(num_drafts)
    tokens = jnp.take_along_axis(ids, jnp.minimum(places, capacity - 1), axis=1)
    num = jnp.where(has_match, jnp.clip(known - found, 0, num_drafts), 0)
    return tokens, num.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class AssistantDrafter(Stateless):
    """Google's MTP assistant: a burst of M tokens from the target's state and caches.

    Attributes:
      graph: the assistant without arrays.
      num_drafts: M.
      options: which implementations compute it.
      samples: draw the drafts, as the request draws its tokens, instead of taking the best.
      hook: the user's function on the logits, which then changes those of the drafts as well.
    """

    graph: nnx.GraphDef
    num_drafts: int
    options: ComputeOptions
    samples: bool = False
    hook: LogitsHook | None = None
    name: str = "assistant"

    def propose(
        self, params: Any, own: Any, target: Gemma4, state: DecodeState
    ) -> tuple[Proposal, Any]:
        """M tokens for every slot."""
        burst = draft(
            merge(self.graph, params),
            target,
            target_views(target, state.bank),
            state.tokens,
            state.hidden,
            state.bank.lengths,
            self.num_drafts,
            bias=state.sampling.bias,
            options=self.options,
            # The best token alone is found without scores of the whole vocabulary.
            choose=functools.partial(_choose, self, state) if self.samples or self.hook else None,
        )
        num = jnp.full(state.tokens.shape, self.num_drafts)
        return Proposal(burst.tokens, num, burst.logits if self.samples else None), own


def _choose(
    drafter: "AssistantDrafter | ModelDrafter",
    state: DecodeState,
    logits: Float[Array, "B V"],
    i: int,
) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
    """Chooses draft i of a burst from `logits` the way the request chooses its tokens."""
    places = state.bank.lengths + 1 + i
    law = allowed_logits(logits, state.sampling, places, drafter.hook)
    if not drafter.samples:
        return jnp.argmax(law, axis=-1).astype(jnp.int32), law
    law = drawing_logits(law, state.sampling)
    drawn = jnp.argmax(law + noise(state.sampling, places, law.shape[-1], DRAFT), axis=-1)
    return drawn.astype(jnp.int32), law


@dataclasses.dataclass(frozen=True)
class CombinedDrafter(Stateless):
    """The n-gram's tokens where it has a match, the assistant's elsewhere, in one verify pass."""

    ngram: NgramDrafter
    assistant: AssistantDrafter
    name: str = "combined"

    @property
    def num_drafts(self) -> int:
        """M."""
        return self.assistant.num_drafts

    def propose(
        self, params: Any, own: Any, target: Gemma4, state: DecodeState
    ) -> tuple[Proposal, Any]:
        """Either's tokens, slot by slot."""
        looked_up, _ = self.ngram.propose((), (), target, state)
        drafted, _ = self.assistant.propose(params, (), target, state)
        # Half a match is worth less than a whole burst.
        has_match = looked_up.num == self.num_drafts
        tokens = jnp.where(has_match[:, None], looked_up.tokens, drafted.tokens)
        return Proposal(tokens, drafted.num, source=jnp.where(has_match, 0, 1)), own


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Any smaller Gemma 4 with the target's vocabulary, with caches of its own.

    It runs M + 1 steps a burst: the last one only takes the last draft into its caches, so that
    they hold all that can be accepted and a rollback to the target's length is always enough.
    """

    graph: nnx.GraphDef
    num_drafts: int
    options: ComputeOptions
    samples: bool = False
    hook: LogitsHook | None = None
    name: str = "model"

    def propose(
        self, params: Any, own: CacheBank, target: Gemma4, state: DecodeState
    ) -> tuple[Proposal, CacheBank]:
        """M tokens for every slot."""
        model = merge(self.graph, params)
        tokens, drafted, laws = state.tokens, [], []
        rows = state.is_active.astype(jnp.int32)
        for i in range(self.num_drafts + 1):
            hidden, own = model(tokens[:, None], own, rows, options=self.options)
            tokens, law = _choose(self, state, model.logits(hidden[:, 0]), i)
            drafted.append(tokens)
            laws.append(law)
        num = jnp.full(tokens.shape, self.num_drafts)
        law = jnp.stack(laws, axis=1)[:, :-1] if self.samples else None
        return Proposal(jnp.stack(drafted, axis=1)[:, :-1], num, law), own

    def commit(self, own: CacheBank, lengths: Lengths) -> CacheBank:
        """Its caches cut to the target's length."""
        return dataclasses.replace(own, lengths=lengths)

    def prefill(
        self, params: Any, own: CacheBank, tokens: Tokens, num_valid: Lengths, slot: Slots
    ) -> CacheBank:
        """Its caches with the chunk added."""
        _, own = merge(self.graph, params)(tokens, own, num_valid, slot, self.options)
        return own
