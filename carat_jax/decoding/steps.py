"""The jitted steps: fixed shapes, state in, state out, every cache donated.

    prefill   T rows of one slot, logits of the last real row
    round     draft M tokens, verify them in one pass of M + 1 rows a slot, accept, commit;
              without a drafter it is one row a slot: plain decoding. A call may run several, one
              after the other; what they drew is stacked
    verify    the pass alone: R rows of every slot, their logits and states
    accept    the rest of a round alone
    score     T rows of one slot, log-probabilities of given next tokens
    first     one token for one slot after its prefill
    release   a slot decodes no more; it is to hold its first positions, or none

Each compiles once per declared shape. `round` is one executable. With `uniform_rows` it is three
(draft, verify, accept), so that plain and speculative decoding run the very same verify pass.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from carat_jax.array_types import Array, Bool, Float, Int, Lengths, Slots, Tokens
from carat_jax.cache import bank as banks
from carat_jax.cache.bank import CacheBank
from carat_jax.decoding import sampling
from carat_jax.decoding.drafters import Drafter, Proposal
from carat_jax.decoding.sampling import LogitsHook, SamplingState
from carat_jax.decoding.speculative import (
    accept_points,
    accept_sampled,
    simulated_acceptance,
)
from carat_jax.decoding.state import DecodeState
from carat_jax.model.params import merge
from carat_jax.numerics.options import ComputeOptions, compiler_options

# Log-probability of each token, and the best ids with theirs; None where nobody asked.
Told = tuple[Float[Array, "B rows"], Int[Array, "B rows n"], Float[Array, "B rows n"]] | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["packed", "logprobs", "top_ids", "top_logprobs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a step tells the host, rows in the order of positions.

    Attributes:
      packed: `tokens`, `num`, `num_drafts` and `source` side by side, so that they are one copy.
      logprobs, top_ids, top_logprobs: None unless asked for.
    """

    packed: Int[Array, "*rounds B rows_and_3"]
    logprobs: Float[Array, "*rounds B rows"] | None
    top_ids: Int[Array, "*rounds B rows n"] | None
    top_logprobs: Float[Array, "*rounds B rows n"] | None

    @classmethod
    def of(
        cls,
        tokens: Int[Array, "B rows"],
        num: Lengths,
        told: Told,
        num_drafts: Lengths | None = None,
        source: Lengths | None = None,
    ) -> "Drawn":
        """From its parts; without drafts by default."""
        counts = (num, *(jnp.zeros_like(num) if x is None else x for x in (num_drafts, source)))
        packed = jnp.concatenate([tokens, *(x[:, None] for x in counts)], axis=1)
        return cls(packed, *(told or (None, None, None)))

    @property
    def tokens(self) -> Int[Array | np.ndarray, "*rounds B rows"]:
        """The target's draws; the first `num` of each slot are committed.

        -1 where the logits are NaN or rule out every token.
        """
        return self.packed[..., :-3]

    @property
    def num(self) -> Int[Array | np.ndarray, "*rounds B"]:
        """Committed tokens."""
        return self.packed[..., -3]

    @property
    def num_drafts(self) -> Int[Array | np.ndarray, "*rounds B"]:
        """Drafts that were verified."""
        return self.packed[..., -2]

    @property
    def source(self) -> Int[Array | np.ndarray, "*rounds B"]:
        """Whose drafts they were, see `Proposal`."""
        return self.packed[..., -1]


@dataclasses.dataclass(frozen=True)
class SamplerKind:
    """Static choice of a sampler: whether any slot draws or is penalised, or wants logprobs."""

    draws: bool
    logprobs: bool


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What the steps of one engine are compiled for.

    Attributes:
      compute: which implementations compute the model; `num_keys` comes with each call.
      num_top: alternatives that a sampler with log-probabilities returns.
      uniform_rows: rows a slot of every verify pass; 0 is what the drafts need.
      simulate_acceptance: tokens a round commits on average, whatever was drafted; None is off.
      rounds_per_call: rounds a call of `round` runs; their `Drawn` have that axis first if it is
        not 1.
    """

    compute: ComputeOptions
    num_top: int
    uniform_rows: int = 0
    simulate_acceptance: float | None = None
    rounds_per_call: int = 1


@dataclasses.dataclass(frozen=True)
class Steps:
    """The compiled functions of one engine; see the module docstring and `build_steps`."""

    prefill: Callable[..., tuple[DecodeState, Array]]
    round: Callable[..., tuple[DecodeState, Drawn]]
    verify: Callable[..., tuple[CacheBank, Array, Array]]
    score: Callable[..., tuple[DecodeState, Drawn]]
    first: Callable[..., tuple[DecodeState, Drawn]]
    admit: Callable[..., DecodeState]
    set_rows: Callable[..., DecodeState]
    fork: Callable[..., DecodeState]
    release: Callable[..., DecodeState]


def build_steps(
    graph: nnx.GraphDef,
    drafter: Drafter,
    options: StepOptions,
    base_bias: Array,
    hook: LogitsHook | None = None,
) -> Steps:
    """Jits the steps of one model and one drafter.

    Args:
      graph: the model without arrays, from `model.params.split`.
      drafter: who proposes tokens.
      options: what to compile for. With the three-stage path each `num_keys` of `round` and
        `verify` is an executable of its own.
      base_bias: what every request's bias starts from, `[V]`: -inf at suppressed tokens.
      hook: a user's function on the logits, compiled into every sampler.

    Returns:
      Functions of `params`, a dict of the "target"'s and the "draft"'s, and of the state.
    """
    allow = functools.partial(_allowed, hook=hook)
    tell = functools.partial(_tell, num_top=options.num_top)

    def prefill(
        params: Any, state: DecodeState, tokens: Tokens, num_valid: Lengths, slot: Slots
    ) -> tuple[DecodeState, Float[Array, "V"]]:
        model, starts = merge(graph, params["target"]), state.bank.lengths[slot]
        hidden, bank = model(tokens, state.bank, num_valid, slot, options.compute, only_last=True)
        last = hidden[0, 0]
        state = dataclasses.replace(
            state,
            bank=bank,
            hidden=state.hidden.at[slot].set(last),
            ids=_record(state.ids, slot, starts, tokens, num_valid),
            draft=drafter.prefill(params["draft"], state.draft, tokens, num_valid, slot),
        )
        return state, model.logits(last)

    def propose(params: Any, state: DecodeState) -> tuple[DecodeState, Proposal]:
        target = merge(graph, params["target"])
        proposal, draft = drafter.propose(params["draft"], state.draft, target, state)
        return dataclasses.replace(state, draft=draft), proposal

    def verify(
        params: Any,
        bank: CacheBank,
        tokens: Tokens,
        num_valid: Lengths,
        num_keys: int | None = None,
    ) -> tuple[CacheBank, Float[Array, "B rows D"], Float[Array, "B rows V"]]:
        model = merge(graph, params["target"])
        compute = dataclasses.replace(options.compute, num_keys=num_keys)
        hidden, bank = model(tokens, bank, num_valid, options=compute)
        return bank, hidden, model.logits(hidden)

    def accept(
        state: DecodeState,
        starts: Lengths,
        proposal: Proposal,
        hidden: Float[Array, "B rows D"],
        logits: Float[Array, "B rows V"],
        kind: SamplerKind,
    ) -> tuple[DecodeState, Drawn]:
        num_rows = logits.shape[1]
        positions = starts[:, None] + 1 + jnp.arange(num_rows)
        rows = _rows_of(state.sampling, proposal.tokens, num_rows)
        allowed = allow(rows, logits, positions, kind)
        if kind.draws and proposal.logits is not None:
            accepted, tokens = _accept_sampled(rows, allowed, positions, proposal)
        else:
            tokens = _draw(rows, allowed, positions, kind)
            accepted = accept_points(proposal.tokens, tokens, proposal.num)
        if options.simulate_acceptance is not None:
            accepted = simulated_acceptance(starts, proposal.num, options.simulate_acceptance)
        tokens, told = tell(allowed, tokens, kind)
        num = jnp.where(state.is_active, accepted + 1, 0)
        slots = jnp.arange(num.shape[0])
        seen = state.sampling.seen
        if kind.draws:
            for row in range(num_rows):
                stands = row < num
                seen = seen.at[slots, tokens[:, row]].max(stands)
        lengths = starts + num
        state = dataclasses.replace(
            state,
            bank=dataclasses.replace(state.bank, lengths=lengths),
            tokens=jnp.where(state.is_active, tokens[slots, accepted], state.tokens),
            hidden=jnp.where(state.is_active[:, None], hidden[slots, accepted], state.hidden),
            ids=_record(state.ids, slots, starts + 1, tokens, num),
            is_active=state.is_active & (lengths + 1 < state.limits),
            sampling=dataclasses.replace(state.sampling, seen=seen),
            draft=drafter.commit(state.draft, lengths),
        )
        return state, Drawn.of(tokens, num, told, proposal.num, proposal.source)

    def whole_round(
        params: Any, state: DecodeState, kind: SamplerKind, num_keys: int | None = None
    ) -> tuple[DecodeState, Drawn]:
        starts = state.bank.lengths
        with jax.named_scope("draft"):
            state, proposal = propose(params, state)
        bank, hidden, logits = verify(
            params, state.bank, *proposal.rows(state, options.uniform_rows), num_keys
        )
        state = dataclasses.replace(state, bank=bank)
        with jax.named_scope("accept"):
            return accept(state, starts, proposal, hidden, logits, kind)

    def several_rounds(
        params: Any, state: DecodeState, kind: SamplerKind, num_keys: int | None = None
    ) -> tuple[DecodeState, Drawn]:
        def one(state: DecodeState, _: None) -> tuple[DecodeState, Drawn]:
            return whole_round(params, state, kind, num_keys)

        return jax.lax.scan(one, state, length=options.rounds_per_call)

    jit = functools.partial(jax.jit, compiler_options=compiler_options())
    jit_verify = jit(verify, donate_argnames="bank", static_argnames="num_keys")

    def uniform_round() -> Callable[..., tuple[DecodeState, Drawn]]:
        @functools.partial(jit, donate_argnames="state")
        def before(params: Any, state: DecodeState):
            state, proposal = propose(params, state)
            return state, proposal, *proposal.rows(state, options.uniform_rows)

        jit_accept = jit(accept, donate_argnames="state", static_argnames="kind")

        def run(params: Any, state: DecodeState, kind: SamplerKind, num_keys: int | None = None):
            state, proposal, tokens, num_valid = before(params, state)
            starts = state.bank.lengths + 0  # the bank is donated, its lengths are still needed
            bank, hidden, logits = jit_verify(params, state.bank, tokens, num_valid, num_keys)
            state = dataclasses.replace(state, bank=bank)
            return jit_accept(state, starts, proposal, hidden, logits, kind)

        return run

    def score(
        params: Any,
        state: DecodeState,
        tokens: Tokens,
        num_valid: Lengths,
        slot: Slots,
        targets: Tokens,
    ) -> tuple[DecodeState, Drawn]:
        model = merge(graph, params["target"])
        hidden, bank = model(tokens, state.bank, num_valid, slot, options.compute)
        told = sampling.log_probabilities(model.logits(hidden), targets, options.num_top)
        drawn = Drawn.of(targets, num_valid, told)
        return dataclasses.replace(state, bank=bank), drawn

    def first(
        state: DecodeState, logits: Float[Array, "V"], slot: Slots, kind: SamplerKind
    ) -> tuple[DecodeState, Drawn]:
        row = jax.tree.map(lambda x: x[slot], state.sampling)
        position = state.bank.lengths[slot]
        allowed = allow(row, logits[None, None], position[:, None], kind)
        tokens, told = tell(allowed, _draw(row, allowed, position[:, None], kind), kind)
        token, one = tokens[:, 0], jnp.ones_like(position)
        seen = state.sampling.seen.at[slot, token].set(True) if kind.draws else state.sampling.seen
        state = dataclasses.replace(
            state,
            tokens=state.tokens.at[slot].set(token),
            ids=_record(state.ids, slot, position, tokens, one),
            is_active=state.is_active.at[slot].set(position + 1 < state.limits[slot]),
            sampling=dataclasses.replace(state.sampling, seen=seen),
        )
        return state, Drawn.of(tokens, one, told)

    def admit(state: DecodeState, slot: Array, limit: Array, row: dict[str, Array]) -> DecodeState:
        fields = row | {"bias": base_bias, "seen": jnp.zeros_like(base_bias, dtype=bool)}
        changed = {
            name: getattr(state.sampling, name).at[slot].set(value)
            for name, value in fields.items()
        }
        return dataclasses.replace(
            state,
            limits=state.limits.at[slot].set(limit),
            sampling=dataclasses.replace(state.sampling, **changed),
        )

    def set_rows(
        state: DecodeState, slot: Array, bias: Float[Array, "V"], seen: Bool[Array, "V"]
    ) -> DecodeState:
        sampler = dataclasses.replace(
            state.sampling,
            bias=state.sampling.bias.at[slot].set(base_bias + bias),
            seen=state.sampling.seen.at[slot].set(seen),
        )
        return dataclasses.replace(state, sampling=sampler)

    def fork(state: DecodeState, src: Array, dst: Array) -> DecodeState:
        copied = ("bank", "hidden", "ids", "draft")
        parts = {name: getattr(state, name) for name in copied}
        return dataclasses.replace(state, **banks.copy(parts, src, dst))

    def release(state: DecodeState, slot: Array, length: Array) -> DecodeState:
        lengths = state.bank.lengths.at[slot].set(length)
        return dataclasses.replace(
            state,
            bank=dataclasses.replace(state.bank, lengths=lengths),
            is_active=state.is_active.at[slot].set(False),
            draft=drafter.commit(state.draft, lengths),
        )

    fused = whole_round if options.rounds_per_call == 1 else several_rounds
    return Steps(
        prefill=jit(prefill, donate_argnames="state"),
        round=uniform_round()
        if options.uniform_rows
        else jit(fused, donate_argnames="state", static_argnames=("kind", "num_keys")),
        verify=jit_verify,
        score=jit(score, donate_argnames="state"),
        first=jit(first, donate_argnames="state", static_argnames="kind"),
        admit=jit(admit, donate_argnames="state"),
        set_rows=jit(set_rows, donate_argnames="state"),
        fork=jit(fork, donate_argnames="state"),
        release=jit(release, donate_argnames="state"),
    )


def _allowed(
    state: SamplingState,
    logits: Float[Array, "b rows V"],
    positions: Int[Array, "b rows"],
    kind: SamplerKind,
    hook: LogitsHook | None,
) -> Float[Array, "b rows V"]:
    """The law of every row that is reported; `state` holds the rows flat, `[b * rows]`."""
    flat = logits.reshape(-1, logits.shape[-1])
    flat = sampling.allowed_logits(flat, state, positions.reshape(-1), hook, penalise=kind.draws)
    return flat.reshape(logits.shape)


def _draw(
    state: SamplingState,
    allowed: Float[Array, "b rows V"],
    positions: Int[Array, "b rows"],
    kind: SamplerKind,
) -> Int[Array, "b rows"]:
    """The target's own token of every row."""
    if not kind.draws:
        return jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    flat = allowed.reshape(-1, allowed.shape[-1])
    return sampling.draw(flat, state, positions.reshape(-1)).reshape(positions.shape)


def _accept_sampled(
    state: SamplingState,
    allowed: Float[Array, "b rows V"],
    positions: Int[Array, "b rows"],
    proposal: Proposal,
) -> tuple[Int[Array, "b"], Int[Array, "b rows"]]:
    """Accepted drafts of a proposal that was sampled, and every row's token to commit."""
    num_rows, vocab_size = allowed.shape[1:]
    places, flat = positions.reshape(-1), allowed.reshape(-1, vocab_size)
    law = sampling.drawing_logits(flat, state).reshape(allowed.shape)
    noise = sampling.noise(state, places, vocab_size).reshape(allowed.shape)
    keys = sampling.keys(state, places, sampling.ACCEPT)
    uniforms = jax.vmap(jax.random.uniform)(keys).reshape(positions.shape)
    num_drafts = proposal.tokens.shape[1]
    accepted, tokens = accept_sampled(
        proposal.tokens, proposal.logits, law, proposal.num, uniforms[:, :num_drafts], noise
    )
    return accepted, jnp.pad(tokens, ((0, 0), (0, num_rows - tokens.shape[1])))


def _tell(
    allowed: Float[Array, "b rows V"], tokens: Int[Array, "b rows"], kind: SamplerKind, num_top: int
) -> tuple[Int[Array, "b rows"], Told]:
    """The tokens, -1 where there is none to draw, and what is told of them if anybody asked."""
    tokens = jnp.where(jnp.isfinite(jnp.max(allowed, axis=-1)), tokens, -1)
    if not kind.logprobs:
        return tokens, None
    return tokens, sampling.log_probabilities(allowed, tokens, num_top)


def _rows_of(state: SamplingState, drafts: Int[Array, "B M"], num_rows: int) -> SamplingState:
    """The sampling rows of a verify pass, flat: row t has seen the drafts before it."""
    if num_rows == 1:
        return state
    seen, slots = [state.seen], jnp.arange(drafts.shape[0])
    for draft in drafts.T:
        seen.append(seen[-1].at[slots, draft].set(True))
    seen += [seen[-1]] * (num_rows - len(seen))
    rows = jax.tree.map(lambda x: jnp.repeat(x, num_rows, axis=0), state)
    stacked = jnp.stack(seen, axis=1).reshape(-1, state.seen.shape[-1])
    return dataclasses.replace(rows, seen=stacked)


def _record(
    ids: Int[Array, "bank S"], slots: Slots, starts: Slots, tokens: Int[Array, "b T"], num: Slots
) -> Int[Array, "bank S"]:
    """Writes the first `num` tokens of each row at positions `starts + t`; none past the end."""
    row = jnp.arange(tokens.shape[1])
    place = starts[:, None] + row
    beyond = ids.shape[1] + row
    place = jnp.where((row < num[:, None]) & (place < ids.shape[1]), place, beyond)
    return ids.at[slots[:, None], place].set(tokens, mode="drop", unique_indices=True)
