"""From a layer's projection to its attention in one pass: norm, RoPE, cache write, attention.

Decode and verify have a handful of new rows. Left to separate operations, their norms, rotations
and cache writes are eight launches a layer that move a few kilobytes each. Here the programs that
share a slot's keys read the cache as it was, and one of them takes the new positions as one more
block: it makes their keys and values from the projection, attends to them and writes them. Nobody
reads what it writes: in a linear cache those rows are masked, in a ring they hold positions that
have left the window.

A layer that borrows its keys reads the same way and adds nothing.

A key is summed with the rows it came with, not with its cache block, so decode and verify may
round a row differently; steps that promise equal bits use the separate operations.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import reference, tiles
from pallas_kernels.dispatch import check_ring, check_shapes, refusal, resolve
from pallas_kernels.key_sources import Linear, Ring, Span
from pallas_kernels.split_kv import (
    Problem,
    add_block,
    empty_carry,
    first_block,
    flat_rows,
    launch,
    named,
    result,
    result_outputs,
    store_result,
    whole,
)

MAX_ROWS = 64  # group x positions: one tile of rows, because one program writes a block


def append_attention(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    k_cache,
    v_cache,
    starts,
    ends,
    *,
    group,
    eps,
    window=None,
    is_ring=False,
    impl=None,
    tile=None,
):
    """Adds T new positions to a cache and attends from them, causally.

    Args:
      qkv: [B, T, K, G + 2, H], a KV head's G queries, its key and its value as projected; with
        G + 1 the key is the value as well. Row t of slot b is position starts[b] + t.
      q_norm: [H], weight of the queries' norm.
      k_norm: [H], weight of the keys' norm; values are normed without one.
      cos: float32 [B, T, H/2], of the positions' angles; number i turns with number i + H/2.
      sin: float32 [B, T, H/2].
      k_cache: [B, K, S, H]: row p keeps position p, or in a ring row p mod S the newest position p.
      v_cache: [B, K, S, H].
      starts: int32 [B].
      ends: int32 [B], one past the newest real position: rows from there on are padding, are not
        written and their outputs mean nothing. Nor is a row past the end of a linear cache.
      group: G.
      eps: added to the mean of the squares in the norms.
      window: None, or a key is visible iff its distance is below this.
      is_ring: the caches are rings.
      impl: "triton", "xla", "interpret", or None for Triton on a GPU and xla elsewhere.
      tile: overrides the tile choice.

    Returns:
      ([B, T, N, H] in the caches' dtype, k_cache, v_cache), the caches updated in place.

    Raises:
      ValueError: the shapes contradict each other, or `impl` is unknown.
      NotImplementedError: a named impl cannot run this shape, dtype or device.
    """
    if qkv.shape[3] not in (group + 1, group + 2):
        raise ValueError(
            f"append_attention: a KV head of {group} queries has {group + 1} or {group + 2} parts, "
            f"not {qkv.shape[3]}"
        )
    check_angles("append_attention", qkv, cos, sin)
    impl, problem = _plan(
        "append_attention", qkv, (k_cache, v_cache), (starts, ends),
        group=group, window=window, is_ring=is_ring, impl=impl, tile=tile, appends=True,
    )  # fmt: skip
    arrays = qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, starts, ends
    if impl == "xla":
        return reference.append_attention(
            *arrays, group=group, eps=eps, window=window, is_ring=is_ring
        )
    return _run(problem, eps, True, *arrays)


def borrow_attention(
    q, q_norm, cos, sin, k_cache, v_cache, starts, ends, *,
    eps, window=None, is_ring=False, impl=None, tile=None,
):  # fmt: skip
    """Attends from T positions of a layer that reads another's cache: norm, RoPE, attention.

    Args:
      q: [B, T, K, G, H], the queries as projected, by the KV head they read.
      ends: int32 [B], one past the newest position in the cache.
      Else as in `append_attention`; nothing is written.

    Returns:
      [B, T, N, H] in the caches' dtype.

    Raises:
      ValueError: the shapes contradict each other, or `impl` is unknown.
      NotImplementedError: a named impl cannot run this shape, dtype or device.
    """
    check_angles("borrow_attention", q, cos, sin)
    impl, problem = _plan(
        "borrow_attention", q, (k_cache, v_cache), (starts, ends),
        group=q.shape[3], window=window, is_ring=is_ring, impl=impl, tile=tile, appends=False,
    )  # fmt: skip
    if impl == "xla":
        return reference.borrow_attention(
            q, q_norm, cos, sin, k_cache, v_cache, starts, ends,
            eps=eps, window=window, is_ring=is_ring,
        )  # fmt: skip
    arrays = q, q_norm, q_norm, cos, sin, k_cache, v_cache, starts, ends
    return _run(problem, eps, False, *arrays)


def check_angles(kernel, rows, cos, sin):
    """ValueError when a projection [B, T, K, parts, H] and the tables of its angles contradict."""
    angles = (*rows.shape[:2], rows.shape[4] // 2)
    if cos.shape != angles or sin.shape != angles:
        raise ValueError(f"{kernel}: cos {cos.shape} and sin {sin.shape} must be {angles}")


def _plan(kernel, rows, caches, positions, *, group, window, is_ring, impl, tile, appends):
    """(implementation, problem) of a call; the problem is None where no kernel runs."""
    slots, num_new, kv_heads, _, head_dim = rows.shape
    capacity, num_rows = caches[0].shape[2], num_new * group
    q = jax.ShapeDtypeStruct((slots, num_new, kv_heads * group, head_dim), rows.dtype)
    check_shapes(kernel, q, *caches, *positions)
    if is_ring:
        check_ring(kernel, num_new, capacity, window)
    reason = refusal(q, *caches, max_rows=MAX_ROWS, rows=num_rows)
    if num_new > tiles.MAX_POSITIONS:
        reason = f"{num_new} positions are more than {tiles.MAX_POSITIONS}"
    shape = {"rows": num_rows, "head_dim": head_dim, "device": tiles.current_device()}
    if is_ring and reason is None:
        tile = tile or tiles.shared_ring_tile(
            **shape, capacity=capacity, sets=slots * kv_heads, appends=appends
        )
        if capacity % tile.block:
            reason = f"a ring of {capacity} slots is no whole number of blocks of {tile.block}"
    impl = resolve(kernel, impl, q, *caches, reason)
    if impl == "xla":
        return impl, None
    return impl, Problem(
        num_new=num_new,
        num_heads=kv_heads * group,
        group=group,
        head_dim=head_dim,
        rotated=0,
        window=window,
        sources=(Ring(capacity) if is_ring else Linear(capacity),),
        tile=tile or tiles.grouped_tile(**shape, kv_heads=kv_heads, slots=slots, size=capacity),
        interpret=impl == "interpret",
    )


# Jitted so that a step that calls it once a layer traces and lowers it once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    problem, eps, appends,
    qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, starts, ends,
):  # fmt: skip
    """Launches the kernel and the combine of its splits."""
    slots, num_new, kv_heads, parts, head_dim = qkv.shape
    tile, sets = problem.tile, slots * kv_heads

    def by_slot(array):
        return pl.BlockSpec((None, *array.shape[1:]), lambda i, j, h: (h // kv_heads, 0, 0))

    rows = pl.BlockSpec(
        (None, num_new, None, parts, head_dim),
        lambda i, j, h: (h // kv_heads, 0, h % kv_heads, 0, 0),
    )
    cache = pl.BlockSpec(
        (None, None, *k_cache.shape[2:]), lambda i, j, h: (h // kv_heads, h % kv_heads, 0, 0)
    )
    ins = [(x, whole(x)) for x in (starts, ends, q_norm, k_norm)]
    ins += [(cos, by_slot(cos)), (sin, by_slot(sin)), (qkv, rows)]
    ins += [(k_cache, cache), (v_cache, cache)]
    outs = result_outputs(problem, slots, v_cache.dtype)
    num_outs = len(outs)
    if appends:
        outs += [(jax.ShapeDtypeStruct(x.shape, x.dtype), cache) for x in (k_cache, v_cache)]
    where = "ring" if isinstance(problem.sources[0], Ring) else "linear"
    name = f"carat_{'append' if appends else 'borrow'}_{where}"
    written = launch(
        named(name, _kernel, problem, eps, appends),
        grid=(problem.parts, tile.splits, sets),
        ins=ins,
        outs=outs,
        tile=tile,
        interpret=problem.interpret,
        aliases={len(ins) - 2: num_outs, len(ins) - 1: num_outs + 1} if appends else {},
    )
    shape = (slots, num_new, problem.num_heads, head_dim)
    out = result(name, problem, written[:num_outs], shape, v_cache.dtype)
    return (out, *written[num_outs:]) if appends else out


class _NewRows:
    """What a program makes of its KV head's new rows: queries, keys and values by index t.

    A head is taken in its two halves, because RoPE turns number i with number i + H/2. Keys come
    as columns, [H/2, rows], the way the scores read them.
    """

    def __init__(self, problem, eps, weights, tables, rows_ref):
        self.problem, self.eps, self.rows_ref = problem, eps, rows_ref
        self.q_norm, self.k_norm = weights
        self.tables = tables
        self.half = problem.head_dim // 2

    def _load(self, at, live, column, size, axis):
        """Numbers `column..` of the rows `at` (t, part), those on `axis`."""
        where = [jnp.expand_dims(x, axis) for x in at]
        index = (*where, jnp.expand_dims(column + jnp.arange(size), 1 - axis))
        mask = jnp.expand_dims(live, axis)
        return plt.load(self.rows_ref.at[index], mask=mask, other=0.0)

    def _turned(self, at, live, weight_ref, axis, dtype):
        """Both halves after norm and RoPE; each is rounded once, as in the plain code."""
        half = self.half
        low, high = (self._load(at, live, start, half, axis) for start in (0, half))
        rounded, low, high = low.dtype, low.astype(jnp.float32), high.astype(jnp.float32)
        squares = (low * low).sum(axis) + (high * high).sum(axis)
        inverse = jnp.expand_dims(lax.rsqrt(squares / (2 * half) + self.eps), axis)

        def norm(part, start):
            weight = weight_ref[pl.ds(start, half)].astype(jnp.float32)
            part = part * inverse * jnp.expand_dims(weight, 1 - axis)
            return part.astype(rounded).astype(jnp.float32)

        low, high = norm(low, 0), norm(high, half)
        index = jnp.expand_dims(at[0], axis), jnp.expand_dims(jnp.arange(half), 1 - axis)
        mask = jnp.expand_dims(live, axis)
        cos, sin = (plt.load(table.at[index], mask=mask, other=0.0) for table in self.tables)
        return (low * cos - high * sin).astype(dtype), (high * cos + low * sin).astype(dtype)

    def queries(self, dtype):
        """Both halves of the tile's queries [rows, H/2], and the index t of each."""
        row = jnp.arange(self.problem.tile.rows)
        t, head = row // self.problem.group, row % self.problem.group
        live = row < self.problem.num_rows
        return self._turned((t, head), live, self.q_norm, 1, dtype), t

    def keys(self, t, live, dtype):
        """Both halves of the keys of rows t, [H/2, rows]."""
        part = jnp.full(t.shape, self.problem.group)
        return self._turned((t, part), live, self.k_norm, 0, dtype)

    def values(self, t, live, column, dtype):
        """The program's columns of the values of rows t, [rows, columns]."""
        at = t, jnp.full(t.shape, self.rows_ref.shape[1] - 1)
        whole = self._load(at, live, 0, self.problem.head_dim, 1).astype(jnp.float32)
        inverse = lax.rsqrt((whole * whole).sum(1) / self.problem.head_dim + self.eps)[:, None]
        part = self._load(at, live, column, self.problem.columns, 1).astype(jnp.float32)
        return (part * inverse).astype(dtype)


def _kernel(
    problem, eps, appends, starts_ref, ends_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, *refs
):
    """One program: grid (column parts, splits, slots x KV heads)."""
    rows_ref, k_ref, v_ref, *outputs = refs
    outputs, cache_outs = (outputs[:-2], outputs[-2:]) if appends else (outputs, ())
    tile, window, (source,) = problem.tile, problem.window, problem.sources
    part, split = pl.program_id(0), pl.program_id(1)
    kv_heads = problem.num_heads // problem.group
    slot, kv_head = pl.program_id(2) // kv_heads, pl.program_id(2) % kv_heads
    start, end = starts_ref[slot], ends_ref[slot]
    oldest = jnp.maximum(0, start - window + 1) if window is not None else 0
    # A slot without new rows does not run: none of its keys are read.
    known = jnp.where(end > start, start, 0) if appends else end
    span = Span(start, known, start, start + problem.num_new - 1, jnp.int32(oldest))
    is_ring = isinstance(source, Ring)
    # A program for each block and one for the new positions.
    is_block = is_ring and tile.splits == source.size // tile.block + appends
    dtype, half, column = v_ref.dtype, problem.head_dim // 2, part * problem.columns
    new = _NewRows(problem, eps, (q_norm_ref, k_norm_ref), (cos_ref, sin_ref), rows_ref)
    (q_low, q_high), t = new.queries(dtype)
    low, high, columns = pl.ds(0, half), pl.ds(half, half), pl.ds(column, problem.columns)

    def attend(carry, k_low, k_high, v, pos, exists):
        scores = plt.dot(q_low, k_low) + plt.dot(q_high, k_high)
        q_pos = start + t
        visible = (pos[None, :] <= q_pos[:, None]) & exists[None, :]
        if window is not None:
            visible &= q_pos[:, None] - pos[None, :] < window
        return add_block(problem, carry, jnp.where(visible, scores, -jnp.inf), v)

    def visit(i, carry):
        """A block as it was before the new positions, which nobody may see in it."""
        row, pos = source.locate(i, span, tile.block)
        begin, stop = source.bounds(span)
        exists = (pos >= begin) & (pos < stop)
        rows = pl.ds(row, tile.block)
        if is_block:
            # Loads that do not wait for the slot's length; its dead slots are dropped after.
            k_low, k_high, v = k_ref[rows, low], k_ref[rows, high], v_ref[rows, columns]
            v = jnp.where(exists[:, None], v, 0.0)
        else:
            k_low, k_high, v = (
                plt.load(ref.at[rows, where], mask=exists[:, None], other=0.0)
                for ref, where in ((k_ref, low), (k_ref, high), (v_ref, columns))
            )
        return attend(carry, k_low.T, k_high.T, v, pos, exists)

    def visit_new(carry):
        """The new positions, which are written as well."""
        new_t = jnp.arange(tiles.MAX_POSITIONS)
        pos = start + new_t
        exists = (new_t < problem.num_new) & (pos < end)
        exists = exists if is_ring else exists & (pos < source.size)
        k_low, k_high = new.keys(new_t, exists, dtype)
        v = new.values(new_t, exists, column, dtype)
        row = lax.rem(pos, source.size) if is_ring else pos
        first, (k_out, v_out) = (exists & (part == 0))[None, :], cache_outs
        for k, begin in ((k_low, 0), (k_high, half)):
            at = row[None, :], begin + jnp.arange(half)[:, None]
            plt.store(k_out.at[at], k, mask=first)
        at = row[:, None], column + jnp.arange(problem.columns)[None, :]
        plt.store(v_out.at[at], v, mask=exists[:, None])
        return attend(carry, k_low, k_high, v, pos, exists)

    carry, last = empty_carry(problem), tile.splits - 1
    if is_block and appends:
        carry = lax.cond(split == last, visit_new, lambda carry: visit(split, carry), carry)
    elif is_block:
        carry = visit(split, carry)
    else:
        first, stop = source.blocks(span, tile.block)
        mine = first_block(first, split, tile.splits)
        count = pl.cdiv(jnp.maximum(stop - mine, 0), tile.splits)
        # The new positions are one block more, dealt in turn like the others; taken first, while
        # the registers of the running output are free.
        if appends:
            is_next = lax.rem(jnp.maximum(stop, first), tile.splits) == split
            carry = lax.cond(is_next, visit_new, lambda carry: carry, carry)
        carry = lax.fori_loop(0, count, lambda n, c: visit(mine + n * tile.splits, c), carry)
    flat, _, live = flat_rows(problem, 0, kv_head)
    store_result(problem, outputs, flat, live, column, carry)
