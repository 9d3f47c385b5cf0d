"""The value cache of a global layer whose keys equal its values: most of a key is not stored.

There a key is `rope(k_norm.weight * u)` and the value is `u`, the normed projection. Only the first
and third quarter-ranges of a head rotate (128 of 512 numbers in the published models), so the
other numbers of a key are the value's times a constant that can move into the query. Cached are
the values and the rotated numbers of the keys: 640 numbers a position and head instead of 1,024.
"""

import dataclasses
import functools

import jax

from carat_jax.array_types import Array, CacheRows, Float, Keys, Lengths, Slots, Values
from carat_jax.cache.rows import append_rows, of_slots
from carat_jax.numerics.attention import RotatedView, linear_positions, rotated_part


@functools.partial(jax.tree_util.register_dataclass, data_fields=["v", "k_rot"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class ValueCache:
    """Values `[B, K, S, H]` and the rotated numbers of the keys `[B, K, S, R]`."""

    v: CacheRows
    k_rot: Float[Array, "B K S R"]

    @property
    def capacity(self) -> int:
        """Positions the cache holds."""
        return self.v.shape[2]

    def extend(
        self,
        k: Keys,
        v: Values,
        starts: Lengths,
        num_valid: Lengths,
        slots: Slots | None,
        window: int | None,
    ) -> tuple["ValueCache", RotatedView]:
        """Appends rows at positions `starts + t`; as `LinearCache.extend`."""
        del window
        k_rot = rotated_part(k, self.k_rot.shape[-1])
        written = ValueCache(
            append_rows(self.v, v, starts, num_valid, slots),
            append_rows(self.k_rot, k_rot, starts, num_valid, slots),
        )
        return written, written.view(starts + num_valid, slots)

    def view(self, ends: Lengths, slots: Slots | None) -> RotatedView:
        """What queries see when `slots` hold `ends` positions; the key weight is still missing."""
        v, k_rot = of_slots(self.v, slots), of_slots(self.k_rot, slots)
        return RotatedView(v, k_rot, linear_positions(ends, self.capacity), ends)
