"""The ring cache of a local layer: position p lives in slot p mod C, and nothing ever moves.

    Invariant: after `ends[b]` positions were written, slot s of row b holds the newest position
    p < ends[b] with p mod C = s, or nothing if that p is negative.

So the positions of all slots follow from `ends`; they are never stored. A step of T rows may be
written before its own queries read as long as T <= C - W + 1: the keys it overwrites are then
older than the window of its first query. Rejecting drafts moves `ends` back by up to C - W rows:
the slots in front of the new end hold newer rows than the invariant says, but those lie ahead of
every later query until they are overwritten, and the rows they replaced were already out of reach.

Longer chunks, and those of more rows than the ring's kernel takes, read (ring, chunk) first and
write afterwards; of a chunk longer than the ring only the last C rows land.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from carat_jax.array_types import Array, CacheRows, Int, Keys, Lengths, Slots, Values
from carat_jax.cache.rows import of_slots, write_rows
from carat_jax.numerics.attention import KeyView, RingView, chunk_view, ring_positions
from pallas_kernels.tiles import MAX_POSITIONS


def ring_capacity(window: int, max_rows: int, block: int = 1) -> int:
    """Slots a ring needs so that steps of `max_rows` rows can be written in place and rolled back.

    A verify step of M drafts has M + 1 rows. The result is a multiple of `block`.
    """
    return -(-(window + max_rows) // block) * block


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class RingCache:
    """Keys and values of one local layer, `[B, K, C, H]`."""

    k: CacheRows
    v: CacheRows

    @property
    def capacity(self) -> int:
        """Positions the ring holds."""
        return self.k.shape[2]

    def extend(
        self,
        k: Keys,
        v: Values,
        starts: Lengths,
        num_valid: Lengths,
        slots: Slots | None,
        window: int,
    ) -> tuple["RingCache", KeyView]:
        """Adds rows at positions `starts + t` and shows what their queries may look at.

        Args:
          k, v: new rows, `[b, T, K, H]` for the `b` cache slots named in `slots`.
          starts: positions already in each of those slots, `[b]`.
          num_valid: how many of the T rows are real, `[b]`; the others are not written.
          slots: the cache slot each row of the step belongs to, `[b]`; None is all B in order.
          window: W of the layer.

        Returns:
          The new cache, and the view for the queries of these rows.
        """
        num_rows = k.shape[1]
        rows = starts[:, None] + jnp.arange(num_rows)
        written = self._write(k, v, rows, num_valid, slots)
        if num_rows <= min(self.capacity - window + 1, MAX_POSITIONS):
            return written, written.view(starts + num_valid, slots)
        return written, chunk_view(self.view(starts, slots), k, v, starts, num_valid)

    def view(self, ends: Lengths, slots: Slots | None) -> RingView:
        """What queries see after `ends` positions were written to `slots`."""
        k, v = of_slots(self.k, slots), of_slots(self.v, slots)
        return RingView(k, v, ring_positions(ends, self.capacity), ends)

    def _write(
        self,
        k: Keys,
        v: Values,
        rows: Int[Array, "b T"],
        num_valid: Lengths,
        slots: Slots | None,
    ) -> "RingCache":
        row = jnp.arange(rows.shape[1])
        # Of a chunk longer than the ring only the last C rows land.
        lands = (row < num_valid[:, None]) & (row >= num_valid[:, None] - self.capacity)
        index = rows % self.capacity
        return RingCache(
            write_rows(self.k, k, index, lands, slots), write_rows(self.v, v, index, lands, slots)
        )
