"""Split-KV attention on Triton: the two kernels behind the attention functions of this package.

A program takes one tile of query rows (the G heads of a KV head x T positions), visits its share of
the key blocks and keeps a running maximum, sum and output in float32; a second kernel merges the
shares. Rows are read from and written to [B, T, N, H] as it is: row r is position r // G of head
r % G, so no transpose and no padding runs outside. Keys that do not exist are never loaded (zeros
stand in) and score -inf, so whatever their slots hold cannot leak, and a row that sees nothing
gives zeros. A fully masked block adds exact zeros, so a longer cache or a later verify changes no
earlier bit.
Imports `tiles`, `key_sources` and `reference` (the constant for an empty row) of the package.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.key_sources import Chunk, Ring, Source, Span
from pallas_kernels.reference import EMPTY
from pallas_kernels.tiles import Tile, next_power_of_two

LOG2_E = 1.4426950408889634
COLUMNS = 128  # of the output that one combining program writes
COMBINE = Tile(rows=16, block=16, splits=1, warps=4, stages=1)  # its warps and stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The static shape of one call."""

    num_new: int  # T
    num_heads: int  # N
    group: int  # G = N / K
    head_dim: int  # H
    rotated: int  # width of the rotated keys of the v_rot layout, else 0
    window: int | None
    sources: tuple[Source, ...]
    tile: Tile
    interpret: bool  # run in Pallas's interpreter

    @property
    def num_rows(self) -> int:
        """Query rows of one KV head."""
        return self.num_new * self.group

    @property
    def columns(self) -> int:
        """Output columns of one program."""
        return self.tile.columns or self.head_dim

    @property
    def parts(self) -> int:
        """Programs that share a row tile's keys and write different columns."""
        return self.head_dim // self.columns

    @property
    def num_tiles(self) -> int:
        """Row tiles of one KV head."""
        return pl.cdiv(self.num_rows, self.tile.rows)


def flat_rows(problem, tile_index, kv_head):
    """Of a tile's rows: index into [T * N], new position, and whether the row is no padding."""
    row = tile_index * problem.tile.rows + jnp.arange(problem.tile.rows)
    new, head = row // problem.group, row % problem.group
    return new * problem.num_heads + kv_head * problem.group + head, new, row < problem.num_rows


def _load_queries(problem, q_ref, norm_ref, flat, live, dtype):
    """The query tile and, for v_rot, its rotated columns.

    With v_rot the stored values stand for the unrotated keys: k_norm's weight belongs to them and
    is folded into q before q is rounded; the rotated columns meet the stored rotated keys instead.
    """

    def load(columns):
        index = (flat[:, None], columns[None, :])
        return plt.load(q_ref.at[index], mask=live[:, None], other=0.0)

    columns = jnp.arange(problem.head_dim)
    q = load(columns)
    if not problem.rotated:
        return q.astype(dtype), None
    half, rotated_half = problem.head_dim // 2, problem.rotated // 2
    folded = q.astype(jnp.float32) * norm_ref[...].astype(jnp.float32)[None, :]
    is_rotated = (columns % half) < rotated_half
    kept = jnp.arange(problem.rotated)
    kept = jnp.where(kept < rotated_half, kept, kept - rotated_half + half)
    return jnp.where(is_rotated[None, :], 0.0, folded).astype(dtype), load(kept).astype(dtype)


def empty_carry(problem):
    """(o, top, mass) of rows that have seen nothing."""
    rows = problem.tile.rows
    # Tiles of 32 rows sum the weights key by key, and across the block at the end: 6 % faster than
    # a reduction a block. Tiles of 16 rows were slower with it (218 against 165 us).
    wide = problem.tile.block if rows == 32 else 1
    return (
        jnp.zeros((rows, problem.columns), jnp.float32),
        jnp.full((rows,), EMPTY, jnp.float32),
        jnp.zeros((rows, wide), jnp.float32),
    )


def _weights(problem, scores, top):
    """2 ** (scores * LOG2_E - top) in two instructions; below 2 ** -126 it is 0."""
    if problem.interpret:
        return jnp.exp2(scores * LOG2_E - top)
    fused = "fma.rn.f32 x, $1, 0f3FB8AA3B, $2; ex2.approx.ftz.f32 $0, x;"
    return plt.elementwise_inline_asm(
        "{ .reg .f32 x; " + fused + " }",
        args=[scores, jnp.broadcast_to(-top, scores.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(scores.shape, scores.dtype)],
    )[0]


def add_block(problem, carry, scores, v):
    """The running (o, top, mass) after a block of values with masked `scores`, [rows, block].

    `top` is that of scores * LOG2_E, so that a weight takes one multiply-add and one power of two.
    """
    o, top, mass = carry
    new_top = jnp.maximum(top, scores.max(1) * LOG2_E)
    decay = jnp.exp2(top - new_top)
    weights = _weights(problem, scores, new_top[:, None])
    o = o * decay[:, None] + plt.dot(weights.astype(v.dtype), v)
    wide = mass.shape[1]
    share = weights if wide == weights.shape[1] else weights.sum(1)[:, None]
    if 1 < wide != share.shape[1]:  # a block of another width: its sum goes to the first key's
        share = jnp.where(jnp.arange(wide)[None, :] == 0, share, 0.0)
    return o, new_top, mass * decay[:, None] + share


def store_result(problem, outputs, flat, live, column, carry):
    """Writes what a program has summed: its rows of the output, or what `_combine` merges."""
    o, top, mass = *carry[:2], carry[2].sum(1)
    columns = column + jnp.arange(problem.columns)[None, :]
    if len(outputs) == 1:
        o *= (1.0 / jnp.where(mass > 0, mass, 1.0))[:, None]
        at = flat[:, None], columns
        plt.store(outputs[0].at[at], o.astype(outputs[0].dtype), mask=live[:, None])
    else:
        o_ref, top_ref, mass_ref = outputs
        rows = jnp.arange(problem.tile.rows)[:, None]
        plt.store(o_ref.at[rows, columns], o, mask=live[:, None])
        top_ref[...] = top
        mass_ref[...] = mass


def _whole_blocks(problem, source, span, first, stop):
    """First and one-past-last of the blocks whose keys all exist, each seen by the whole tile."""
    low, high = source.bounds(span)
    if problem.window is not None:
        low = jnp.maximum(low, span.last - problem.window + 1)
    high, origin, block = jnp.minimum(high, span.first + 1), source.origin(span), problem.tile.block
    end = jnp.clip(lax.div(jnp.maximum(high - origin, 0), block), first, stop)
    return jnp.clip(pl.cdiv(jnp.maximum(low - origin, 0), block), first, end), end


def first_block(first, split, splits):
    """The first block from `first` on that belongs to a split: block i does to i mod splits."""
    return first + lax.rem(split - lax.rem(first, splits) + splits, splits)


def _visit(problem, source, refs, queries, q_pos, span, column, carry):
    """Adds one source's key blocks, those of this split, to the running (o, top, mass).

    A program that takes every block, as in prefill, has a loop without masks for whole blocks and
    one for those at each edge. For 2,048 positions after 4,096 (31B) local layers take 0.197 ms
    against 0.218 with one loop, global ones 2.64 against 2.81. `v_rot` spills in either form.
    """
    k_ref, v_ref = refs
    q, q_rotated = queries
    block, splits, split = problem.tile.block, problem.tile.splits, pl.program_id(1)
    first, stop = source.blocks(span, block)
    if splits > 1:
        first = first_block(first, split, splits)

    one_shot = isinstance(source, Ring) and source.size == block * splits
    low, high = source.bounds(span)
    # What each row may see, [rows, 1], so that a score is compared twice and no more.
    oldest = (
        low if problem.window is None else jnp.maximum(low, q_pos - problem.window + 1)[:, None]
    )
    newest = jnp.minimum(q_pos, high - 1)[:, None]

    def visit(i, carry, *, is_whole=False):
        row, pos = source.locate(i, span, block)
        exists = (pos >= low) & (pos < high)
        rows = pl.ds(row, block)
        if one_shot or is_whole:
            k, v = k_ref[rows, :], v_ref[rows, pl.ds(column, problem.columns)]
            if one_shot:
                # Loads that do not wait for the slot's length; its dead slots are dropped after.
                v = jnp.where(exists[:, None], v, 0.0)
        else:
            k = plt.load(k_ref.at[rows, :], mask=exists[:, None], other=0.0)
            values = v_ref.at[rows, pl.ds(column, problem.columns)]
            v = plt.load(values, mask=exists[:, None], other=0.0)
        scores = plt.dot(q, v.T if problem.rotated else k.T)
        if problem.rotated:
            scores += plt.dot(q_rotated, k.T)
        if not is_whole:
            visible = (pos[None, :] >= oldest) & (pos[None, :] <= newest)
            scores = jnp.where(visible, scores, -jnp.inf)
        return add_block(problem, carry, scores, v)

    if one_shot:
        return visit(first, carry)
    if splits > 1 or problem.rotated or isinstance(source, Ring) or source.size < block:
        steps = pl.cdiv(jnp.maximum(stop - first, 0), splits)
        return lax.fori_loop(0, steps, lambda n, carry: visit(first + n * splits, carry), carry)
    stop = jnp.maximum(stop, first)
    begin, end = _whole_blocks(problem, source, span, first, stop)
    if problem.window is None:
        begin = first  # every row sees the oldest keys
    else:
        carry = lax.fori_loop(first, begin, visit, carry)
    carry = lax.fori_loop(begin, end, functools.partial(visit, is_whole=True), carry)
    return lax.fori_loop(end, stop, visit, carry)


def _attend_kernel(problem, starts_ref, ends_ref, norm_ref, q_ref, *refs):
    """One program: grid (row tiles x column parts, splits, slots x sets of rows)."""
    kv_heads = problem.num_heads // problem.group
    caches, outputs = refs[: 2 * len(problem.sources)], refs[2 * len(problem.sources) :]
    # The last tiles see the most keys: they go first, so that short ones fill the end.
    tile_index = problem.num_tiles - 1 - pl.program_id(0) // problem.parts
    column = pl.program_id(0) % problem.parts * problem.columns
    slot, kv_head = pl.program_id(2) // kv_heads, pl.program_id(2) % kv_heads
    flat, new, live = flat_rows(problem, tile_index, kv_head)
    start, end = starts_ref[slot], ends_ref[slot]
    rows = problem.tile.rows
    first = start + tile_index * rows // problem.group
    last = start + (jnp.minimum((tile_index + 1) * rows, problem.num_rows) - 1) // problem.group
    oldest = jnp.maximum(0, first - problem.window + 1) if problem.window is not None else 0
    span = Span(start, end, first, last, jnp.int32(oldest))
    queries = _load_queries(problem, q_ref, norm_ref, flat, live, caches[1].dtype)
    carry = empty_carry(problem)
    for i, source in enumerate(problem.sources):
        pair = caches[2 * i : 2 * i + 2]
        carry = _visit(problem, source, pair, queries, start + new, span, column, carry)
    store_result(problem, outputs, flat, live, column, carry)


def _combine_kernel(problem, o_ref, top_ref, mass_ref, out_ref, *stat_refs):
    """Merges the splits of one row: grid (rows, slots x sets of rows, column blocks)."""
    splits, columns = problem.tile.splits, min(COLUMNS, problem.head_dim)
    row, head = pl.program_id(0), pl.program_id(1) % (problem.num_heads // problem.group)
    split = jnp.arange(next_power_of_two(splits))
    valid, split = split < splits, jnp.minimum(split, splits - 1)
    at = jnp.full(split.shape, row)
    column = pl.program_id(2) * columns + jnp.arange(columns)
    o = plt.load(
        o_ref.at[split[:, None], at[:, None], column[None, :]], mask=valid[:, None], other=0.0
    )
    top = plt.load(top_ref.at[split, at], mask=valid, other=EMPTY)
    mass = plt.load(mass_ref.at[split, at], mask=valid, other=0.0)
    scale = jnp.exp2(top - top.max())
    total = (mass * scale).sum()
    flat = row // problem.group * problem.num_heads + head * problem.group + row % problem.group
    if stat_refs:
        stat_refs[0][flat], stat_refs[1][flat] = top.max() / LOG2_E, total
    else:
        scale /= jnp.where(total > 0, total, 1.0)
    merged = (o * scale[:, None]).sum(0).astype(out_ref.dtype)
    out_ref[flat, pl.ds(pl.program_id(2) * columns, columns)] = merged


def named(name, function, *static):
    """The kernel with its static arguments bound, under the name that profilers show."""
    kernel = functools.partial(function, *static)

    def run(*refs):
        return kernel(*refs)

    run.__name__ = run.__qualname__ = name
    return run


def whole(array):
    """The spec of an array that every program sees in full."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def launch(kernel, *, grid, ins, outs, tile, interpret, aliases=None):
    """pallas_call over (array, block spec) pairs; `outs` are (shape, spec)."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec for _, spec in ins],
        out_specs=[spec for _, spec in outs],
        out_shape=[shape for shape, _ in outs],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        input_output_aliases=aliases or {},
        interpret=interpret,
        name=kernel.__name__,
    )(*[array for array, _ in ins])


def result_outputs(problem, num_slots, dtype, *, partials=False):
    """(shape, block spec) of what programs write, for `result`; grids as in `_attend_kernel`.

    The output itself where one program sees all keys of its rows, else each split's o, top, mass.
    """
    tile, sets = problem.tile, problem.num_heads // problem.group
    if tile.splits == 1 and not partials:
        rows = (problem.num_new * problem.num_heads, problem.head_dim)
        by_slot = pl.BlockSpec((None, *rows), lambda i, j, h: (h // sets, 0, 0))
        return [(jax.ShapeDtypeStruct((num_slots, *rows), dtype), by_slot)]

    def rows_of(i):
        return problem.num_tiles - 1 - i // problem.parts

    stats = (num_slots * sets, tile.splits, problem.num_tiles * tile.rows)
    stat = pl.BlockSpec((None, None, tile.rows), lambda i, j, h: (h, j, rows_of(i)))
    part = (None, None, tile.rows, problem.head_dim)
    part = pl.BlockSpec(part, lambda i, j, h: (h, j, rows_of(i), 0))
    outs = [(jax.ShapeDtypeStruct((*stats, problem.head_dim), jnp.float32), part)]
    return outs + [(jax.ShapeDtypeStruct(stats, jnp.float32), stat)] * 2


# Jitted so that a step that calls it once a layer traces and lowers it once.
@functools.partial(
    jax.jit,
    static_argnames=("name", "sources", "window", "tile", "per_head", "partials", "interpret"),
)
def attend(
    q,
    caches,
    starts,
    ends,
    *,
    name,
    sources,
    window,
    tile,
    k_norm=None,
    per_head=False,
    partials=False,
    interpret,
):
    """Runs the split kernel and, where there is something to combine, the combining kernel.

    Args:
      q: [B, T, N, H].
      caches: one (k, v) pair a source: [B, K, size, H], or [B, T, K, H] for a Chunk.
      starts: [B] position of row 0.
      ends: [B] one past the newest position.
      name: name of the kernel in profiles and in the lowered module.
      sources: where the keys of each pair are.
      window: keys farther back than this are not seen; None: all are.
      tile: the tile choice.
      k_norm: [H], says that k holds rotated keys only (layout v_rot).
      per_head: a program takes the rows of one query head, not of all that share a KV head.
      partials: return (o, top, mass) in float32 instead of the output in the values' dtype.
      interpret: run in Pallas's interpreter.
    """
    num_slots, num_new, num_heads, head_dim = q.shape
    problem = Problem(
        num_new=num_new,
        num_heads=num_heads,
        group=1 if per_head else num_heads // caches[0][0].shape[1],
        head_dim=head_dim,
        rotated=0 if k_norm is None else caches[0][0].shape[-1],
        window=window,
        sources=sources,
        tile=tile,
        interpret=interpret,
    )
    if problem.rotated and problem.parts > 1:
        raise NotImplementedError(f"{name}: values that carry keys are read whole; got {tile}")
    norm = jnp.zeros((head_dim,), jnp.float32) if k_norm is None else k_norm
    dtype = caches[0][1].dtype
    sets = num_heads // problem.group  # of rows that share keys
    share = sets // caches[0][0].shape[1]  # sets that read one KV head: 1 unless per_head

    def cache_spec(source, array):
        if isinstance(source, Chunk):
            block = (None, array.shape[1], None, array.shape[3])
            return pl.BlockSpec(block, lambda i, j, h: (h // sets, 0, h % sets // share, 0))
        block = (None, None, *array.shape[2:])
        return pl.BlockSpec(block, lambda i, j, h: (h // sets, h % sets // share, 0, 0))

    flat = (num_slots, num_new * num_heads, head_dim)
    by_slot = pl.BlockSpec((None, *flat[1:]), lambda i, j, h: (h // sets, 0, 0))
    ins = [(starts, whole(starts)), (ends, whole(ends)), (norm, whole(norm))]
    ins += [(q.reshape(flat), by_slot)]
    for source, pair in zip(sources, caches, strict=True):
        ins += [(array, cache_spec(source, array)) for array in pair]
    outs = result_outputs(problem, num_slots, dtype, partials=partials)
    written = launch(
        named(name, _attend_kernel, problem),
        grid=(problem.num_tiles * problem.parts, tile.splits, num_slots * sets),
        ins=ins,
        outs=outs,
        tile=tile,
        interpret=interpret,
    )
    out_dtype = jnp.float32 if partials else dtype
    return result(name, problem, written, q.shape, out_dtype, partials=partials)


def result(name, problem, written, shape, dtype, *, partials=False):
    """[B, T, N, H] of what programs wrote, or with `partials` (o, top, mass)."""
    if len(written) == 1:
        return written[0].reshape(shape)
    return _combine(name, problem, written, shape, dtype, partials=partials)


def _combine(name, problem, parts, shape, dtype, *, partials):
    """Merges the partial results of the splits into [B, T, N, H]."""
    num_slots, num_new, num_heads, head_dim = shape
    sets, rows = num_heads // problem.group, num_new * num_heads
    ins = [
        (x, pl.BlockSpec((None, *x.shape[1:]), lambda r, h, c, n=x.ndim: (h, *(0,) * (n - 1))))
        for x in parts
    ]
    by_slot = pl.BlockSpec((None, rows, head_dim), lambda r, h, c: (h // sets, 0, 0))
    outs = [(jax.ShapeDtypeStruct((num_slots, rows, head_dim), dtype), by_slot)]
    if partials:
        stat = pl.BlockSpec((None, rows), lambda r, h, c: (h // sets, 0))
        outs += [(jax.ShapeDtypeStruct((num_slots, rows), jnp.float32), stat)] * 2
    o, *stats = launch(
        named(f"{name}_combine", _combine_kernel, problem),
        grid=(problem.num_rows, num_slots * sets, pl.cdiv(head_dim, COLUMNS)),
        ins=ins,
        outs=outs,
        tile=COMBINE,
        interpret=problem.interpret,
    )
    o = o.reshape(shape)
    return (o, *[s.reshape(shape[:3]) for s in stats]) if partials else o
