"""Reading and writing rows of cache arrays `[B, K, slots, H]`: the two moves all caches share.

A write never shifts: JAX clamps the start of an out-of-range slice update, which would land on
older rows, so rows are scattered one by one and those that do not fit are dropped.
"""

import jax.numpy as jnp

from carat_jax.array_types import Array, Bool, CacheRows, Float, Int, Slots


def of_slots(cache: Array, slots: Slots | None) -> Array:
    """The rows of some cache slots; None is the whole cache, without a copy."""
    return cache if slots is None else cache[slots]


def write_rows(
    cache: CacheRows,
    rows: Float[Array, "b T K H"],
    index: Int[Array, "b T"],
    lands: Bool[Array, "b T"],
    slots: Int[Array, "b"] | None,
) -> CacheRows:
    """Puts row t of each step slot at `index`, where it `lands` and fits; else drops it."""
    if index.size == 1:
        # XLA rewrites the scatter of a single row into a read and an update, and then copies the
        # whole cache before it; a second row, which lands nowhere, keeps it a scatter.
        rows = jnp.pad(rows, ((0, 0), (0, 1), (0, 0), (0, 0)))
        index, lands = (jnp.pad(x, ((0, 0), (0, 1))) for x in (index, lands))
    num_slots, num_rows = index.shape
    capacity = cache.shape[2]
    # What is dropped still needs indices that differ, for the scatter to be free of order.
    beyond = capacity + jnp.arange(num_rows)
    index = jnp.where(lands & (index < capacity), index, beyond)
    slots = jnp.arange(num_slots) if slots is None else slots
    return cache.at[slots[:, None], :, index].set(rows, mode="drop", unique_indices=True)


def append_rows(
    cache: CacheRows,
    rows: Float[Array, "b T K H"],
    starts: Slots,
    num_valid: Slots,
    slots: Slots | None,
) -> CacheRows:
    """Puts the first `num_valid` of T rows at positions `starts + t` of a cache without turns."""
    row = jnp.arange(rows.shape[1])
    return write_rows(cache, rows, starts[:, None] + row, row < num_valid[:, None], slots)
