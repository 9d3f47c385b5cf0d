"""All caches of B sequences: one ring or linear cache per layer that owns one, and the lengths.

The bank is a pytree that every step takes, donates and returns. `lengths[b]` is the number of
positions slot b holds; rolling back, freeing and reusing a slot change it and nothing else.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from carat_jax.array_types import Array, Int, Lengths
from carat_jax.cache.linear import LinearCache
from carat_jax.cache.paged import PagedCache
from carat_jax.cache.ring import RingCache, ring_capacity
from carat_jax.cache.value import ValueCache
from carat_jax.families import LayerSpec, ModelConfig

# Logical axes of a cache array, for `numerics.sharding`.
CACHE_AXES = (None, "kv_heads", None, None)

Cache = RingCache | LinearCache | PagedCache | ValueCache


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "lengths"],
    meta_fields=["max_rollback"],
)
@dataclasses.dataclass(frozen=True)
class CacheBank:
    """Caches of B slots.

    Attributes:
      layers: cache of each KV-owning layer, keyed by the layer's index.
      lengths: positions held by each slot, `[B]` int32.
      max_rollback: rows a slot may be rolled back by, C - W of its rings.
    """

    layers: dict[int, Cache]
    lengths: Lengths
    max_rollback: int

    @property
    def num_slots(self) -> int:
        """B."""
        return self.lengths.shape[0]


@dataclasses.dataclass(frozen=True)
class CacheKinds:
    """Which cache each kind of layer gets.

    Attributes:
      local_layers: "ring"; the baselines are "paged" and "full" (the whole context, masked).
      global_layers: "kv", or "v_rot": values and rotated keys, where keys equal values.
      block: a ring's capacity is rounded up to a multiple of this.
    """

    local_layers: str = "ring"
    global_layers: str = "kv"
    block: int = 1


# Rings and linear caches, rings no larger than they must be.
PLAIN = CacheKinds()


def empty_bank(
    config: ModelConfig,
    num_slots: int,
    max_context: int,
    max_rows: int,
    dtype: DTypeLike,
    kinds: CacheKinds = PLAIN,
) -> CacheBank:
    """A bank whose slots hold nothing. Every leaf is a buffer of its own, so it can be donated.

    Args:
      config: the model.
      num_slots: B.
      max_context: positions a global layer holds.
      max_rows: rows of the longest step that is written in place (verify: M + 1).
      dtype: of keys and values.
      kinds: which caches.

    Raises:
      ValueError: "v_rot" for a model whose values do not carry its keys.
    """
    capacity = ring_capacity(config.sliding_window, max_rows, kinds.block)

    def empty(layer: LayerSpec) -> Cache:
        shape = (num_slots, layer.num_kv_heads, max_context, layer.head_dim)
        ring = (*shape[:2], capacity, shape[3])
        if layer.is_sliding and kinds.local_layers == "ring":
            return RingCache(jnp.zeros(ring, dtype), jnp.zeros(ring, dtype))
        if layer.is_sliding and kinds.local_layers == "paged":
            return PagedCache.empty(ring, dtype)
        if layer.is_sliding or kinds.global_layers == "kv":
            return LinearCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        if not layer.k_eq_v:
            raise ValueError(
                "cache.global_layers: 'v_rot' needs a model whose global values are its unrotated "
                "keys (attention_k_eq_v); use 'kv'"
            )
        rotated = (*shape[:3], config.rotated_width(layer))
        return ValueCache(jnp.zeros(shape, dtype), jnp.zeros(rotated, dtype))

    layers = {layer.index: empty(layer) for layer in config.kv_owners}
    # A full cache can be cut anywhere.
    slack = max_context if kinds.local_layers == "full" else capacity - config.sliding_window
    return CacheBank(layers, jnp.zeros(num_slots, jnp.int32), max_rollback=slack)


def bank_bytes(
    config: ModelConfig,
    num_slots: int,
    max_context: int,
    max_rows: int,
    dtype: DTypeLike,
    kinds: CacheKinds = PLAIN,
) -> int:
    """Bytes of the caches `empty_bank` would make, without making them."""

    def leaves() -> list[Array]:
        bank = empty_bank(config, num_slots, max_context, max_rows, jnp.dtype(dtype), kinds)
        return jax.tree.leaves(bank.layers)

    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.eval_shape(leaves))


def set_length(bank: CacheBank, slot: Int[Array, ""], length: Int[Array, ""]) -> CacheBank:
    """Slot `slot` holds its first `length` positions: 0 frees it."""
    return dataclasses.replace(bank, lengths=bank.lengths.at[slot].set(length))


def insert(bank: CacheBank, slot: Int[Array, ""], single: CacheBank) -> CacheBank:
    """Puts the one sequence of `single`, a bank of one slot and the same capacities, at `slot`."""

    def put(whole: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part, slot, axis=0)

    return jax.tree.map(put, bank, single)


def copy(tree: Any, src: Int[Array, ""], dst: Int[Array, ""]) -> Any:
    """Makes slot `dst` hold what slot `src` holds: one prefill serves several samples.

    Takes a bank, or any tree of arrays whose first axis is the slot.
    """

    def put(whole: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(whole, src, 1, axis=0)
        return jax.lax.dynamic_update_slice_in_dim(whole, part, dst, axis=0)

    return jax.tree.map(put, tree)


def rollback(bank: CacheBank, slot: int, length: int, held: int) -> CacheBank:
    """Cuts slot `slot`, which was written up to `held`, back to `length` positions.

    Args:
      bank: the bank.
      slot: which slot.
      length: positions to keep.
      held: one past the furthest position written since the slot was filled, which the caller
        knows without asking the device. After an earlier rollback that is still the old end.

    Raises:
      ValueError: beyond what a ring keeps, or forward.
    """
    if not 0 <= held - length <= bank.max_rollback:
        raise ValueError(
            f"cannot roll slot {slot} back from {held} to {length} positions: a ring keeps "
            f"{bank.max_rollback} rows beyond its window; prefill again instead"
        )
    return set_length(bank, jnp.int32(slot), jnp.int32(length))
