"""The paged cache of a local layer: what a ring replaces, kept as the baseline it is measured by.

As in an engine with one memory pool for all layers, the window's keys are found through a page
table: each logical page of a slot (position // page) lies on some physical page, and a step gathers
the pages of the window before it can attend. Pages outside the window are reused, so memory is
that of a ring plus one page; what the baseline pays for is the lookup and the gather.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from carat_jax.array_types import Array, Bool, Float, Int, Keys, Lengths, Slots, Values
from carat_jax.cache.rows import of_slots
from carat_jax.numerics.attention import KeyView, LinearView, chunk_view, linear_positions

PAGE = 16


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["k", "v", "table"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Pages of keys and values, `[B, pages, K, PAGE, H]`, and each slot's page table.

    `table[b, i]` is the physical page, among the slot's own, of logical pages congruent to i.
    """

    k: Float[Array, "B pages K page H"]
    v: Float[Array, "B pages K page H"]
    table: Int[Array, "B pages"]

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: DTypeLike) -> "PagedCache":
        """Enough pages for the ring shape `[B, K, C, H]`, in a scattered order."""
        num_slots, num_kv, capacity, head_dim = shape
        num_pages = -(-capacity // PAGE) + 1
        pages = (num_slots, num_pages, num_kv, PAGE, head_dim)
        # A fixed shuffle, other for each slot: contiguous pages would flatter the baseline.
        order = [np.random.default_rng(b).permutation(num_pages) for b in range(num_slots)]
        return cls(jnp.zeros(pages, dtype), jnp.zeros(pages, dtype), jnp.asarray(order, jnp.int32))

    @property
    def capacity(self) -> int:
        """Positions the pages hold."""
        return self.k.shape[1] * PAGE

    def extend(
        self,
        k: Keys,
        v: Values,
        starts: Lengths,
        num_valid: Lengths,
        slots: Slots | None,
        window: int,
    ) -> tuple["PagedCache", KeyView]:
        """Adds rows and shows what their queries may look at; as `RingCache.extend`."""
        num_rows = k.shape[1]
        rows = starts[:, None] + jnp.arange(num_rows)
        row = jnp.arange(num_rows)
        lands = (row < num_valid[:, None]) & (row >= num_valid[:, None] - self.capacity + PAGE)
        written = PagedCache(
            self._write(self.k, k, rows, lands, slots),
            self._write(self.v, v, rows, lands, slots),
            self.table,
        )
        if num_rows <= self.capacity - PAGE - window + 1:
            return written, written.view(starts + num_valid, slots, window + num_rows - 1)
        before = self.view(starts, slots, window)
        return written, chunk_view(before, k, v, starts, num_valid)

    def view(self, ends: Lengths, slots: Slots | None, num_recent: int | None = None) -> LinearView:
        """Gathers the pages that hold the last `num_recent` of `ends` positions; None is all."""
        num_pages = self.table.shape[1]
        if num_recent is not None:
            num_pages = min(-(-num_recent // PAGE) + 1, num_pages)
        last = jnp.maximum(ends - 1, 0) // PAGE
        first = jnp.maximum(last - num_pages + 1, 0)
        logical = first[:, None] + jnp.arange(num_pages)
        base = first * PAGE
        table = of_slots(self.table, slots)
        physical = jnp.take_along_axis(table, logical % table.shape[1], axis=1)

        def gather(pages: Array) -> Array:
            rows = jnp.arange(len(ends)) if slots is None else slots
            found = pages[rows[:, None], physical]
            return jnp.moveaxis(found, 2, 1).reshape(len(ends), found.shape[2], -1, found.shape[4])

        positions = base[:, None] + linear_positions(ends - base, num_pages * PAGE)
        # Of a chunk longer than the pages only the last rows landed: see `extend`.
        oldest = jnp.maximum(base, ends - self.capacity + PAGE)
        positions = jnp.where(positions < oldest[:, None], -1, positions)
        return LinearView(gather(self.k), gather(self.v), positions, ends, base)

    def _write(
        self,
        pages: Array,
        rows: Float[Array, "b T K H"],
        positions: Int[Array, "b T"],
        lands: Bool[Array, "b T"],
        slots: Slots | None,
    ) -> Array:
        slots = jnp.arange(pages.shape[0]) if slots is None else slots
        logical = (positions // PAGE) % self.table.shape[1]
        physical = jnp.take_along_axis(self.table[slots], logical, axis=1)
        # A row that does not land is aimed past the last page, where the scatter drops it.
        physical = jnp.where(lands, physical, pages.shape[1] + jnp.arange(positions.shape[1]))
        return pages.at[slots[:, None], physical, :, positions % PAGE].set(
            rows, mode="drop", unique_indices=True
        )
