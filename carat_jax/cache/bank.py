"""All caches of B sequences: one ring or linear cache per layer that owns one, and the lengths.

The bank is a pytree that every step takes, donates and returns. `lengths[b]` is the number of
positions slot b holds; rolling back, freeing and reusing a slot change it and nothing else.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.array_types import Array, Int, Lengths
from carat_jax.cache.linear import LinearCache
from carat_jax.cache.ring import RingCache, ring_capacity
from carat_jax.families import LayerSpec, ModelConfig

# Logical axes of a cache array, for `numerics.sharding`.
CACHE_AXES = (None, "kv_heads", None, None)


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

    layers: dict[int, RingCache | LinearCache]
    lengths: Lengths
    max_rollback: int

    @property
    def num_slots(self) -> int:
        """B."""
        return self.lengths.shape[0]


def cache_shapes(
    config: ModelConfig, num_slots: int, max_context: int, max_rows: int, block: int = 1
) -> dict[int, tuple[int, int, int, int]]:
    """Shape `[B, K, slots, H]` of the keys (and of the values) of every KV-owning layer.

    Args:
      config: the model.
      num_slots: B.
      max_context: positions a global layer holds.
      max_rows: rows of the longest step that is written in place (verify: M + 1).
      block: a ring's capacity is rounded up to a multiple of this.
    """

    def slots(layer: LayerSpec) -> int:
        if layer.is_sliding:
            return ring_capacity(config.sliding_window, max_rows, block)
        return max_context

    return {
        layer.index: (num_slots, layer.num_kv_heads, slots(layer), layer.head_dim)
        for layer in config.kv_owners
    }


def bank_bytes(shapes: dict[int, tuple[int, int, int, int]], dtype: jnp.dtype) -> int:
    """Bytes of keys and values together."""
    return sum(2 * int(np.prod(shape)) for shape in shapes.values()) * jnp.dtype(dtype).itemsize


def empty_bank(
    config: ModelConfig,
    num_slots: int,
    max_context: int,
    max_rows: int,
    dtype: jnp.dtype,
    block: int = 1,
) -> CacheBank:
    """A bank whose slots hold nothing. Every leaf is a buffer of its own, so it can be donated."""
    shapes = cache_shapes(config, num_slots, max_context, max_rows, block)
    layers = {
        index: (RingCache if config.layer(index).is_sliding else LinearCache)(
            k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype)
        )
        for index, shape in shapes.items()
    }
    capacity = ring_capacity(config.sliding_window, max_rows, block)
    return CacheBank(
        layers, jnp.zeros(num_slots, jnp.int32), max_rollback=capacity - config.sliding_window
    )


def set_length(bank: CacheBank, slot: Int[Array, ""], length: Int[Array, ""]) -> CacheBank:
    """Slot `slot` holds its first `length` positions: 0 frees it."""
    return dataclasses.replace(bank, lengths=bank.lengths.at[slot].set(length))


def insert(bank: CacheBank, slot: Int[Array, ""], single: CacheBank) -> CacheBank:
    """Puts the one sequence of `single`, a bank of one slot and the same capacities, at `slot`."""

    def put(whole: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part, slot, axis=0)

    return jax.tree.map(put, bank, single)


def copy(bank: CacheBank, src: Int[Array, ""], dst: Int[Array, ""]) -> CacheBank:
    """Makes slot `dst` hold what slot `src` holds: one prefill serves several samples."""

    def put(whole: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(whole, src, 1, axis=0)
        return jax.lax.dynamic_update_slice_in_dim(whole, part, dst, axis=0)

    return jax.tree.map(put, bank)


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
