"""The cache of a global layer: position p lives in slot p, appended at the end, cut by length.

Invariant: slots below the length hold what was written there; those above it hold anything
and are masked, never trusted to be zero.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from carat_jax.array_types import CacheRows, Keys, Lengths, Slots, Values
from carat_jax.numerics.attention import KeyView


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LinearCache:
    """Keys and values of one global layer, `[B, K, S, H]`."""

    k: CacheRows
    v: CacheRows

    @property
    def capacity(self) -> int:
        """Positions the cache holds."""
        return self.k.shape[2]

    def extend(
        self,
        k: Keys,
        v: Values,
        starts: Lengths,
        num_valid: Lengths,
        slots: Slots,
        window: int | None,
    ) -> tuple["LinearCache", KeyView]:
        """Appends rows at positions `starts + t`; arguments as in `RingCache.extend`.

        A row at or past the capacity is not written: nothing is ever shifted to make it fit.
        """
        del window
        row = jnp.arange(k.shape[1])
        position = starts[:, None] + row
        lands = (row < num_valid[:, None]) & (position < self.capacity)
        index = jnp.where(lands, position, self.capacity + row)
        written = LinearCache(
            *(
                cache.at[slots[:, None], :, index].set(new, mode="drop", unique_indices=True)
                for cache, new in ((self.k, k), (self.v, v))
            )
        )
        slot = jnp.arange(self.capacity)
        held = jnp.where(slot < (starts + num_valid)[:, None], slot, -1)
        return written, KeyView(written.k[slots], written.v[slots], held)
