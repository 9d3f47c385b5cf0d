"""The experts of a mixture: only the weights of chosen experts are read, each of them once.

A pair is a token and one of its experts. A program takes the tokens of one expert and some columns
of that expert's matrices, so that a verify pass reads the union of its rows' experts once. One
kernel does gate, up, gelu and their product, the second down and the pair's weight; a token's
shares are then summed in the order of its choices, here or by `mixture_norm`. No atomics: the
result is the same bit for bit, and a row's does not depend on its neighbours'.

With up to `FEW_TOKENS` tokens there is a program for every expert, or for every pair where those
are fewer, whatever was chosen. It finds its tokens among all of them, or stops at once; it takes 16
at a time, and so reads its weights again (from the device's cache) only where more of them agree.
Of more tokens the pairs are sorted by expert first and cut into tiles, one for each program.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import product_tiles, reference
from pallas_kernels.activation import gelu
from pallas_kernels.dispatch import choose
from pallas_kernels.product_tiles import ProductTile
from pallas_kernels.tiles import current_device, next_power_of_two


def expert_mlp(x, weights, chosen, gate_up, down, *, impl=None, tile=None):
    """The sum of `expert_shares`, which see, over k: [R, D] in x's dtype.

    A row without any expert gives zeros.
    """
    shares = expert_shares(x, weights, chosen, gate_up, down, impl=impl, tile=tile)
    # What no expert wrote is not zero but undefined.
    shares = jnp.where((chosen < len(gate_up))[..., None], shares, 0)
    terms = (shares[:, k] for k in range(chosen.shape[1]))
    return functools.reduce(operator.add, terms).astype(x.dtype)


def expert_shares(x, weights, chosen, gate_up, down, *, impl=None, tile=None):
    """weights[r, k] * down(gelu(gate x[r]) * up x[r]) by expert chosen[r, k].

    Args:
      x: [R, D].
      weights: float32 [R, k].
      chosen: int32 [R, k], ids of experts, all different in a row; E is no expert.
      gate_up: [E, 2, F, D], each matrix [out, in].
      down: [E, D, F].
      impl: "triton", "xla", "interpret", or None for Triton on a GPU and xla elsewhere.
      tile: overrides the tiles of the two products, a pair.

    Returns:
      float32 [R, k, D]; what it holds where no expert was chosen is undefined.

    Raises:
      ValueError: the shapes, or they and the tiles, contradict each other.
      NotImplementedError: a named impl cannot run this shape, dtype or device.
    """
    rows, hidden = x.shape
    num_experts, _, width, _ = gate_up.shape
    top_k = chosen.shape[1]
    if weights.shape != (rows, top_k) or chosen.shape != (rows, top_k):
        raise ValueError(
            f"expert_mlp: weights {weights.shape} and chosen {chosen.shape} of {rows=}"
        )
    if gate_up.shape[1:] != (2, width, hidden) or down.shape != (num_experts, hidden, width):
        raise ValueError(
            f"expert_mlp: gate_up {gate_up.shape} and down {down.shape} do not fit {hidden=}"
        )
    reason = on_triton = None
    if hidden % 16 or width % 16:
        reason = f"hidden {hidden} and width {width} are not multiples of 16"
    elif gate_up.size >= 2**31:
        reason = f"gate_up {gate_up.shape} has more numbers than an int32 counts"
    if any(array.dtype != jnp.bfloat16 for array in (x, gate_up, down)):
        on_triton = f"{x.dtype.name} tokens, {gate_up.dtype.name} weights: Triton takes bfloat16"
    impl = choose("expert_mlp", impl, reason, on_triton)
    if impl == "xla":
        return reference.expert_shares(x, weights, chosen, gate_up, down)
    device = current_device()
    tile = tile or product_tiles.expert_tiles(rows=rows, hidden=hidden, width=width, device=device)
    tile[0].check("expert_mlp", hidden, width)
    tile[1].check("expert_mlp", width, hidden)
    if rows > product_tiles.FEW_TOKENS and tile[0].rows != tile[1].rows:
        raise ValueError(f"expert_mlp: sorted pairs are cut once, not for {tile[0]} and {tile[1]}")
    return _run(x, weights, chosen, gate_up, down, tile=tile, interpret=impl == "interpret")


@dataclasses.dataclass(frozen=True)
class Direct:
    """Pairs of few tokens, as the router left them: a program looks for its expert in all of them.

    A program belongs to an expert, or where there are fewer pairs than experts to a pair, whose
    expert's it is if no earlier pair has the same.
    """

    num_rows: int
    top_k: int
    num_experts: int

    @property
    def num_programs(self) -> int:
        """As many as there can be experts with a token."""
        return min(self.num_rows * self.top_k, self.num_experts)

    def most_tiles(self, tile_rows):
        """Tiles of an expert that every token chose."""
        return pl.cdiv(self.num_rows, tile_rows)

    def find(self, tile_rows, chosen_ref):
        """(expert, number of its tiles, function of a tile: its tokens, pairs, which exist)."""
        slot, num_pairs = pl.program_id(1), self.num_rows * self.top_k
        row = jnp.arange(max(tile_rows, next_power_of_two(self.num_rows)))
        k = jnp.arange(next_power_of_two(self.top_k))[None]
        pair = row[:, None] * self.top_k + k
        exists = (row[:, None] < self.num_rows) & (k < self.top_k)
        ids = plt.load(chosen_ref.at[pair], mask=exists, other=self.num_experts)
        by_pair = num_pairs < self.num_experts
        expert = chosen_ref[slot] if by_pair else slot
        hit = ids == expert
        if by_pair:
            first = jnp.where(hit, pair, num_pairs).min()
            hit &= (first == slot) & (expert < self.num_experts)
        mine = hit.astype(jnp.int32).max(1)
        # Rows of the tile without a pair name one of their own, or one past the last: the
        # interpreter writes what is masked back to where it points.
        pair = (row[:, None] * self.top_k + jnp.where(hit, k, 0)).max(1)
        if self.most_tiles(tile_rows) == 1:  # row r of the tile is token r
            return expert, mine.max(), lambda _: (row, pair, mine > 0)
        place = jnp.where(row[None] < row[:, None], mine[None], 0).sum(1)  # among the expert's
        count = mine.sum()

        def rows_of(tile):
            wanted = tile * tile_rows + jnp.arange(tile_rows)
            at = (place[None] == wanted[:, None]) & (mine[None] > 0)
            token, found = (jnp.where(at, x[None], 0).sum(1) for x in (row, pair))
            return token, jnp.where(wanted < count, found, num_pairs), wanted < count

        return expert, pl.cdiv(count, tile_rows), rows_of


@dataclasses.dataclass(frozen=True)
class Sorted:
    """Pairs of many tokens, sorted by expert and cut into tiles; tables from `_sort_pairs`."""

    num_programs: int
    top_k: int

    def most_tiles(self, tile_rows):
        """A program has one."""
        return 1

    def find(self, tile_rows, order_ref, experts_ref, starts_ref, ends_ref):
        """(expert, number of its tiles, function of a tile: its tokens, pairs, which exist)."""
        group = pl.program_id(1)
        start, end = starts_ref[group], ends_ref[group]

        def rows_of(_):
            place = start + jnp.arange(tile_rows)
            pair = plt.load(order_ref.at[place], mask=place < len(order_ref), other=len(order_ref))
            return pair // self.top_k, pair, place < end

        return experts_ref[group], (start < end).astype(jnp.int32), rows_of


def _sort_pairs(chosen, num_experts, tile_rows):
    """The pairs' order by expert, and of each tile its expert, first and one-past-last place.

    Tiles of `tile_rows` pairs of one expert, as many as any choice of experts can need.
    """
    flat, num_pairs = chosen.reshape(-1), chosen.size
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    ends = (flat[:, None] <= experts).sum(0, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    num_tiles = -((starts - ends) // tile_rows)
    last_tiles = jnp.cumsum(num_tiles)
    most = min(num_pairs, num_experts)
    tile = jnp.arange(most + (num_pairs - most) // tile_rows, dtype=jnp.int32)
    expert = (last_tiles <= tile[:, None]).sum(1, dtype=jnp.int32)
    known = jnp.minimum(expert, num_experts - 1)
    first = starts[known] + (tile - last_tiles[known] + num_tiles[known]) * tile_rows
    return order, known, first, jnp.where(expert < num_experts, ends[known], 0)


def _sum_blocks(tile, num_inputs, load_rows, weight_refs, expert, columns):
    """Products of the tile's rows with columns of some matrices of an expert, float32."""
    on_matrix_units = tile.rows >= 16
    shape = (tile.rows, tile.columns) if on_matrix_units else (tile.rows, tile.columns, tile.block)

    def step(i, sums):
        inputs = pl.ds(i * tile.block, tile.block)
        rows = load_rows(i * tile.block + jnp.arange(tile.block))
        blocks = [ref[(expert, *at, columns, inputs)] for ref, at in weight_refs]
        if on_matrix_units:
            return [total + plt.dot(rows, w.T) for total, w in zip(sums, blocks, strict=True)]
        rows = rows.astype(jnp.float32)[:, None]
        return [t + rows * w.astype(jnp.float32)[None] for t, w in zip(sums, blocks, strict=True)]

    sums = [jnp.zeros(shape, jnp.float32) for _ in weight_refs]
    sums = lax.fori_loop(0, num_inputs // tile.block, step, sums)
    return sums if on_matrix_units else [total.sum(2) for total in sums]


def _masked_rows(ref, rows, exists):
    """Loads columns of given rows, zeros where the row does not exist."""

    def load(columns):
        return plt.load(ref.at[rows[:, None], columns[None]], mask=exists[:, None], other=0.0)

    return load


def _each_tile(num_tiles, most, run):
    """run(i) for every tile; a loop, where one tile is the most, would take twice the registers."""
    if most == 1:
        pl.when(num_tiles > 0)(lambda: run(0))
    else:
        lax.fori_loop(0, num_tiles, lambda i, _: run(i), None)


def _gate_up_kernel(pairs, tile, x_ref, gate_up_ref, *refs):
    """gelu(gate x) * up x of one expert's tokens: grid (column tiles, `pairs`' programs)."""
    *tables, out_ref = refs
    expert, num_tiles, rows_of = pairs.find(tile.rows, *tables)
    first = pl.program_id(0) * tile.columns
    columns, weights = pl.ds(first, tile.columns), [(gate_up_ref, (i,)) for i in range(2)]

    def run(i):
        token, pair, exists = rows_of(i)
        load = _masked_rows(x_ref, token, exists)
        gate, up = _sum_blocks(tile, x_ref.shape[1], load, weights, expert, columns)
        at = out_ref.at[pair[:, None], first + jnp.arange(tile.columns)[None]]
        plt.store(at, (gelu(gate) * up).astype(out_ref.dtype), mask=exists[:, None])

    _each_tile(num_tiles, pairs.most_tiles(tile.rows), run)


def _down_kernel(pairs, tile, gated_ref, down_ref, weight_ref, *refs):
    """One expert's share of its tokens, weighted: grid (column tiles, `pairs`' programs)."""
    *tables, out_ref = refs
    expert, num_tiles, rows_of = pairs.find(tile.rows, *tables)
    first = pl.program_id(0) * tile.columns
    columns, weights = pl.ds(first, tile.columns), [(down_ref, ())]

    def run(i):
        _, pair, exists = rows_of(i)
        load = _masked_rows(gated_ref, pair, exists)
        (total,) = _sum_blocks(tile, gated_ref.shape[1], load, weights, expert, columns)
        weight = plt.load(weight_ref.at[pair], mask=exists, other=0.0)
        at = out_ref.at[pair[:, None], first + jnp.arange(tile.columns)[None]]
        plt.store(at, total * weight[:, None], mask=exists[:, None])

    _each_tile(num_tiles, pairs.most_tiles(tile.rows), run)


def _call(name, kernel, pairs, tile: ProductTile, arrays, columns, out, interpret):
    """pallas_call over whole arrays, `columns` outputs in tiles for every tile of pairs."""

    def run(*refs):
        kernel(pairs, tile, *refs)

    run.__name__ = run.__qualname__ = name
    return pl.pallas_call(
        run,
        grid=(columns // tile.columns, pairs.num_programs),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name=name,
    )(*arrays)


# Jitted so that a step that calls it once a layer traces and lowers it once.
@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def _run(x, weights, chosen, gate_up, down, *, tile, interpret):
    """Both kernels."""
    (rows, top_k), (num_experts, _, width, hidden) = chosen.shape, gate_up.shape
    first, second = tile
    chosen = chosen.astype(jnp.int32)
    if rows <= product_tiles.FEW_TOKENS:
        pairs, tables = Direct(rows, top_k, num_experts), (chosen.reshape(-1),)
    else:
        tables = _sort_pairs(chosen, num_experts, first.rows)
        pairs = Sorted(len(tables[1]), top_k)
    num_pairs = rows * top_k
    gated = _call(
        "carat_expert_gate_up", _gate_up_kernel, pairs, first, (x, gate_up, *tables), width,
        jax.ShapeDtypeStruct((num_pairs, width), x.dtype), interpret,
    )  # fmt: skip
    shares = _call(
        "carat_expert_down", _down_kernel, pairs, second,
        (gated, down, weights.astype(jnp.float32).reshape(-1), *tables), hidden,
        jax.ShapeDtypeStruct((num_pairs, hidden), jnp.float32), interpret,
    )  # fmt: skip
    return shares.reshape(rows, top_k, hidden)
