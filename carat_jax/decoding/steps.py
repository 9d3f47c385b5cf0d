"""The jitted steps: fixed shapes, state in, state out, every cache donated.

    prefill   T rows of one slot, logits of the last real row
    extend    T rows of every slot, logits of all rows (what a verify step runs)
    decode    `extend` of one row, over the slots' own last tokens
    score     T rows of one slot, log-probabilities of given next tokens
    sample    one token a slot from logits; first: the same for one slot after its prefill

Each compiles once per declared shape. Model and sampler are separate executables, so the four
kinds of sampler (drawn or greedy, with log-probabilities or without) cost no further compilation
of the model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from carat_jax.array_types import Array, Bool, Float, Int, Lengths, Slots, Tokens
from carat_jax.cache import bank as banks
from carat_jax.cache.bank import CacheBank
from carat_jax.decoding import sampling
from carat_jax.decoding.sampling import LogitsHook, SamplingState
from carat_jax.model.params import merge
from carat_jax.numerics.attention import AttentionOptions


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["bank", "tokens", "is_active", "sampling"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything about B running sequences that lives on the device.

    Attributes:
      bank: caches and lengths.
      tokens: each slot's last token, drawn but not yet in the cache, `[B]`.
      is_active: which slots decode, `[B]`.
      sampling: how each slot draws.
    """

    bank: CacheBank
    tokens: Int[Array, "B"]
    is_active: Bool[Array, "B"]
    sampling: SamplingState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "logprobs", "top_ids", "top_logprobs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Drawn:
    """What one sampling step tells the host; log-probabilities are None unless asked for."""

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"] | None
    top_ids: Int[Array, "B n"] | None
    top_logprobs: Float[Array, "B n"] | None


@dataclasses.dataclass(frozen=True)
class SamplerKind:
    """Static choice of a sampler: whether any slot draws, is penalised, or wants logprobs."""

    draws: bool
    logprobs: bool


@dataclasses.dataclass(frozen=True)
class Steps:
    """The compiled functions of one engine; see the module docstring and `build_steps`."""

    prefill: Callable[..., tuple[DecodeState, Array]]
    extend: Callable[..., tuple[CacheBank, Array]]
    decode: Callable[..., tuple[DecodeState, Array]]
    score: Callable[..., tuple[DecodeState, Drawn]]
    sample: Callable[..., tuple[DecodeState, Drawn]]
    first: Callable[..., tuple[DecodeState, Drawn]]
    admit: Callable[..., DecodeState]
    set_rows: Callable[..., DecodeState]
    fork: Callable[..., DecodeState]
    release: Callable[..., DecodeState]


def empty_state(bank: CacheBank, vocab_size: int) -> DecodeState:
    """No slot in use."""
    num_slots = bank.num_slots
    return DecodeState(
        bank=bank,
        tokens=jnp.zeros(num_slots, jnp.int32),
        is_active=jnp.zeros(num_slots, bool),
        sampling=sampling.empty_sampling(num_slots, vocab_size),
    )


def build_steps(
    graph: nnx.GraphDef,
    options: AttentionOptions,
    num_top: int,
    base_bias: Array,
    hook: LogitsHook | None = None,
) -> Steps:
    """Jits the steps of one model.

    Args:
      graph: the model without arrays, from `model.params.split`.
      options: how attention is computed. `num_keys` of `extend` and `decode` is static: with the
        three-stage path each key count is an executable of its own.
      num_top: how many alternatives a sampler with log-probabilities returns.
      base_bias: what every request's bias starts from, `[V]`: -inf at suppressed tokens.
      hook: a user's function on the logits, compiled into every sampler.
    """

    def prefill(
        params: Any, state: DecodeState, tokens: Tokens, num_valid: Lengths, slot: Slots
    ) -> tuple[DecodeState, Float[Array, "V"]]:
        model = merge(graph, params)
        hidden, bank = model(tokens, state.bank, num_valid, slot, options)
        last = hidden[0, jnp.maximum(num_valid[0] - 1, 0)]
        return dataclasses.replace(state, bank=bank), model.logits(last)

    def extend(
        params: Any,
        bank: CacheBank,
        tokens: Tokens,
        num_valid: Lengths,
        num_keys: int | None = None,
    ) -> tuple[CacheBank, Float[Array, "B T V"]]:
        model = merge(graph, params)
        rung = dataclasses.replace(options, num_keys=num_keys)
        hidden, bank = model(tokens, bank, num_valid, options=rung)
        return bank, model.logits(hidden)

    def decode(
        params: Any, state: DecodeState, num_keys: int | None = None
    ) -> tuple[DecodeState, Float[Array, "B V"]]:
        rows = state.is_active.astype(jnp.int32)
        bank, logits = extend(params, state.bank, state.tokens[:, None], rows, num_keys)
        return dataclasses.replace(state, bank=bank), logits[:, 0]

    def score(
        params: Any,
        state: DecodeState,
        tokens: Tokens,
        num_valid: Lengths,
        slot: Slots,
        targets: Tokens,
    ) -> tuple[DecodeState, Drawn]:
        model = merge(graph, params)
        hidden, bank = model(tokens, state.bank, num_valid, slot, options)
        told = sampling.log_probabilities(model.logits(hidden[0]), targets[0], num_top)
        return dataclasses.replace(state, bank=bank), Drawn(targets[0], *told)

    def sample(
        state: DecodeState, logits: Float[Array, "B V"], kind: SamplerKind
    ) -> tuple[DecodeState, Drawn]:
        drawn, seen = _draw(state.sampling, logits, state.bank.lengths, kind, hook, num_top)
        tokens = jnp.where(state.is_active, drawn.tokens, state.tokens)
        sampler = dataclasses.replace(state.sampling, seen=seen)
        return dataclasses.replace(state, tokens=tokens, sampling=sampler), drawn

    def first(
        state: DecodeState, logits: Float[Array, "V"], slot: Slots, kind: SamplerKind
    ) -> tuple[DecodeState, Drawn]:
        row = jax.tree.map(lambda x: x[slot], state.sampling)
        drawn, seen = _draw(row, logits[None], state.bank.lengths[slot], kind, hook, num_top)
        return dataclasses.replace(
            state,
            tokens=state.tokens.at[slot].set(drawn.tokens),
            is_active=state.is_active.at[slot].set(True),
            sampling=dataclasses.replace(
                state.sampling, seen=state.sampling.seen.at[slot].set(seen)
            ),
        ), drawn

    def admit(state: DecodeState, slot: Array, row: dict[str, Array]) -> DecodeState:
        fields = row | {"bias": base_bias, "seen": jnp.zeros_like(base_bias, dtype=bool)}
        changed = {
            name: getattr(state.sampling, name).at[slot].set(value)
            for name, value in fields.items()
        }
        return dataclasses.replace(state, sampling=dataclasses.replace(state.sampling, **changed))

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
        return dataclasses.replace(state, bank=banks.copy(state.bank, src, dst))

    def release(state: DecodeState, slot: Array) -> DecodeState:
        return dataclasses.replace(
            state,
            bank=banks.set_length(state.bank, slot, 0),
            is_active=state.is_active.at[slot].set(False),
        )

    return Steps(
        prefill=jax.jit(prefill, donate_argnames="state"),
        extend=jax.jit(extend, donate_argnames="bank", static_argnames="num_keys"),
        decode=jax.jit(decode, donate_argnames="state", static_argnames="num_keys"),
        score=jax.jit(score, donate_argnames="state"),
        sample=jax.jit(sample, donate_argnames="state", static_argnames="kind"),
        first=jax.jit(first, donate_argnames="state", static_argnames="kind"),
        admit=jax.jit(admit, donate_argnames="state"),
        set_rows=jax.jit(set_rows, donate_argnames="state"),
        fork=jax.jit(fork, donate_argnames="state"),
        release=jax.jit(release, donate_argnames="state"),
    )


def _draw(
    state: SamplingState,
    logits: Float[Array, "B V"],
    positions: Lengths,
    kind: SamplerKind,
    hook: LogitsHook | None,
    num_top: int,
) -> tuple[Drawn, Bool[Array, "B V"]]:
    """Draws a token for `positions`, and marks it as seen."""
    logits = sampling.allowed_logits(logits, state, positions, hook, penalise=kind.draws)
    if kind.draws:
        tokens = sampling.draw(logits, state, positions)
        seen = state.seen.at[jnp.arange(tokens.size), tokens].set(True)
    else:
        tokens, seen = jnp.argmax(logits, axis=-1).astype(jnp.int32), state.seen
    told = (None, None, None)
    if kind.logprobs:
        told = sampling.log_probabilities(logits, tokens, num_top)
    return Drawn(tokens, *told), seen
