"""The cache of a global layer: position p lives in slot p, appended at the end, cut by length.

Invariant: slots below the length hold what was written there; those above it hold anything
and are masked, never trusted to be zero.
"""

import dataclasses
import functools

import jax

from carat_jax.array_types import CacheRows, Keys, Lengths, Slots, Values
from carat_jax.cache.rows import append_rows, of_slots
from carat_jax.numerics.attention import LinearView, linear_positions


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
        slots: Slots | None,
        window: int | None,
    ) -> tuple["LinearCache", LinearView]:
        """Appends rows at positions `starts + t`; arguments as in `RingCache.extend`.

        A row at or past the capacity is not written: nothing is ever shifted to make it fit.
        """
        del window
        written = LinearCache(
            append_rows(self.k, k, starts, num_valid, slots),
            append_rows(self.v, v, starts, num_valid, slots),
        )
        return written, written.view(starts + num_valid, slots)

    def view(self, ends: Lengths, slots: Slots | None) -> LinearView:
        """What queries see when `slots` hold `ends` positions."""
        k, v = of_slots(self.k, slots), of_slots(self.v, slots)
        return LinearView(k, v, linear_positions(ends, self.capacity), ends)
