"""Where a slot's keys are and which positions a block of them holds: caches, rings, a chunk.

A kernel visits blocks by number; a source says which blocks a program needs, where block i lies in
its array, the positions it holds and which of them exist. Imports nothing of the package.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


@dataclasses.dataclass(frozen=True)
class Span:
    """What one program knows about its rows and its slot; traced numbers."""

    start: jax.Array  # position of the slot's row 0
    end: jax.Array  # one past the newest position of the slot
    first: jax.Array  # positions of the tile's first and last row
    last: jax.Array
    oldest: jax.Array  # the oldest position that any row of the tile may see


@dataclasses.dataclass(frozen=True)
class Linear:
    """Row p of a cache of `size` rows keeps position p."""

    size: int

    def blocks(self, span, block):
        """First and one-past-last block to visit."""
        stop = jnp.minimum(jnp.minimum(span.end, self.size), span.last + 1)
        return span.oldest // block, pl.cdiv(stop, block)

    def bounds(self, span):
        """Oldest position that exists and may be seen, and one past the newest."""
        return span.oldest, jnp.minimum(span.end, self.size)

    def origin(self, span):
        """Position of the first key of block 0."""
        return 0

    def locate(self, i, span, block):
        """(row of the array, positions of the block)."""
        return i * block, i * block + jnp.arange(block)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slot p mod size keeps the newest position p below the slot's end; visited slot by slot."""

    size: int

    def blocks(self, span, block):
        """First and one-past-last block to visit: all, or none of a ring that holds nothing."""
        return 0, jnp.where(span.end > 0, jnp.int32(self.size // block), jnp.int32(0))

    def bounds(self, span):
        """Oldest position that exists and may be seen, and one past the newest."""
        return span.oldest, span.end

    def locate(self, i, span, block):
        """(row of the array, positions of the block)."""
        newest = span.end - 1
        turn = newest - lax.rem(jnp.maximum(newest, 0), self.size)
        pos = turn + i * block + jnp.arange(block)
        return i * block, jnp.where(pos > newest, pos - self.size, pos)


@dataclasses.dataclass(frozen=True)
class RingHistory:
    """A ring that ends where the chunk starts; visited by position, so that tiles can skip."""

    size: int

    def blocks(self, span, block):
        """First and one-past-last block to visit."""
        return span.oldest // block, pl.cdiv(span.start, block)

    def bounds(self, span):
        """Oldest position that exists and may be seen, and one past the newest."""
        return jnp.maximum(span.oldest, span.start - self.size), span.start

    def origin(self, span):
        """Position of the first key of block 0."""
        return 0

    def locate(self, i, span, block):
        """(row of the array, positions of the block)."""
        return lax.rem(i * block, self.size), i * block + jnp.arange(block)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The new keys themselves: row t is position start + t."""

    size: int

    def blocks(self, span, block):
        """First and one-past-last block to visit."""
        first = jnp.maximum(span.oldest - span.start, 0) // block
        stop = jnp.minimum(jnp.minimum(span.end, span.last + 1) - span.start, self.size)
        return first, pl.cdiv(jnp.maximum(stop, 0), block)

    def bounds(self, span):
        """Oldest position that exists and may be seen, and one past the newest."""
        return span.oldest, jnp.minimum(span.end, span.start + self.size)

    def origin(self, span):
        """Position of the first key of block 0."""
        return span.start

    def locate(self, i, span, block):
        """(row of the array, positions of the block)."""
        return i * block, span.start + i * block + jnp.arange(block)


Source = Linear | Ring | RingHistory | Chunk
