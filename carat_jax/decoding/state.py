"""Everything about B running sequences that lives on the device, as one donated pytree."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from carat_jax.array_types import Array, Bool, Float, Int
from carat_jax.cache.bank import CacheBank
from carat_jax.decoding.sampling import SamplingState, empty_sampling
from carat_jax.families import ModelConfig


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("bank", "tokens", "hidden", "ids"),
        *("is_active", "limits", "sampling", "draft"),
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """B sequences.

    Attributes:
      bank: caches and lengths.
      tokens: each slot's last token, drawn but not yet in the cache, `[B]`.
      hidden: the final-normed state that produced it, `[B, D]`.
      ids: prompt and output of each slot by position, `[B, S]`, the last token included.
      is_active: which slots decode, `[B]`.
      limits: known ids, prompt and output, at which a slot stops decoding, `[B]`.
      sampling: how each slot draws.
      draft: the drafter's own state, slots first.
    """

    bank: CacheBank
    tokens: Int[Array, "B"]
    hidden: Float[Array, "B D"]
    ids: Int[Array, "B S"]
    is_active: Bool[Array, "B"]
    limits: Int[Array, "B"]
    sampling: SamplingState
    draft: Any = ()


def empty_state(
    bank: CacheBank, config: ModelConfig, max_context: int, dtype: DTypeLike, draft: Any = ()
) -> DecodeState:
    """No slot in use."""
    num_slots = bank.num_slots
    return DecodeState(
        bank=bank,
        tokens=jnp.zeros(num_slots, jnp.int32),
        hidden=jnp.zeros((num_slots, config.hidden_size), dtype),
        ids=jnp.zeros((num_slots, max_context), jnp.int32),
        is_active=jnp.zeros(num_slots, bool),
        limits=jnp.full(num_slots, jnp.iinfo(jnp.int32).max),
        sampling=empty_sampling(num_slots, config.vocab_size),
        draft=draft,
    )
