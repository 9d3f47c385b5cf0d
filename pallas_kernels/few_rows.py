"""Products of a few rows with a weight, of which a decode or verify step mostly consists.

A program takes all rows and a tile of the columns, and walks the inputs: all of them, or the blocks
of one split where the columns alone are too few to give every multiprocessor a program. What splits
leave are float32 parts of the sum, which whoever reads the product sums in their order:
`residual_norm` as it loads them, `gated_row_parts` likewise, one more pass elsewhere.

The rows may be those that a per-layer input gates, gelu(gate) * up: every program sums the gate's
parts and gates what it walks over by itself, which costs less than the launches that it saves.

Rows come in tiles of 16 or 32, which the matrix instructions sum alike: a row's bits do not depend
on how many rows there are. No atomics.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import reference
from pallas_kernels.activation import gelu
from pallas_kernels.dispatch import choose
from pallas_kernels.product_tiles import MAX_FEW_ROWS, few_row_tile
from pallas_kernels.tiles import current_device, next_power_of_two


def few_row_product(x, weight, *, impl=None, tile=None):
    """x @ weight, accumulated in float32 and rounded: the sum of `few_row_parts`.

    Returns [*rows, N] in x's dtype; arguments and errors are those of `few_row_parts`.
    """
    return sum_parts(few_row_parts(x, weight, impl=impl, tile=tile), x.dtype)


def sum_parts(parts, dtype):
    """The sum of parts [S, ...] in their order, rounded to `dtype`."""
    return functools.reduce(operator.add, parts).astype(dtype)


def few_row_parts(x, weight, *, impl=None, tile=None):
    """Parts whose sum in their order is x @ weight, each over its share of the inputs.

    Args:
      x: [*rows, K], at most `MAX_FEW_ROWS` rows.
      weight: [K, N].
      impl: "triton", "xla", "interpret", or None for Triton on a GPU and xla elsewhere.
      tile: overrides the tile.

    Returns:
      [S, *rows, N]: float32, or one part in x's dtype where nothing is split.

    Raises:
      ValueError: the shapes, or they and the tile, contradict each other.
      NotImplementedError: a named impl cannot run this shape, dtype or device.
    """
    if weight.ndim != 2 or x.shape[-1] != len(weight):
        raise ValueError(f"few_row_product: rows {x.shape} do not fit a weight {weight.shape}")
    rows = x.shape[:-1]
    impl, tile = _choose("few_row_product", rows, x.dtype, weight, impl, tile)
    if impl == "xla":
        return reference.few_row_product(x, weight)[None]
    parts = _run((x.reshape(-1, len(weight)),), weight, tile=tile, interpret=impl == "interpret")
    return parts.reshape(-1, *rows, parts.shape[-1])


def gated_row_parts(gates, ups, layer, weight, *, impl=None, tile=None):
    """Parts whose sum is (gelu(gate) * ups[..., layer, :]) @ weight, as in `few_row_parts`.

    Args:
      gates: [S, *rows, K], parts whose sum, rounded to the dtype of `ups`, is the gate.
      ups: [*rows, L, K], what is gated in each of L layers.
      layer: int32 scalar; it may be traced, and costs no slice.
      weight: [K, N].
      impl, tile: as in `few_row_parts`, as are the result and what is raised. What is gated is
        rounded before it is multiplied.
    """
    rows, inputs = ups.shape[:-2], ups.shape[-1]
    if gates.shape[1:] != (*rows, inputs) or weight.shape[:-1] != (inputs,):
        raise ValueError(
            f"gated_row_parts: gates {gates.shape}, ups {ups.shape} and weight {weight.shape} do "
            "not match"
        )
    impl, tile = _choose("gated_row_parts", rows, ups.dtype, weight, impl, tile)
    if impl == "xla":
        return reference.gated_row_product(gates, ups, layer, weight)[None]
    flat = gates.reshape(len(gates), -1, inputs), ups.reshape(-1, *ups.shape[-2:])
    layer = jnp.full(1, layer, jnp.int32)
    parts = _run((*flat, layer), weight, tile=tile, interpret=impl == "interpret")
    return parts.reshape(-1, *rows, parts.shape[-1])


def _choose(kernel, rows, dtype, weight, impl, tile):
    """The implementation and the tile of a product of `rows` with `weight`."""
    (inputs, outputs), num_rows = weight.shape, math.prod(rows)
    reason = on_triton = None
    if num_rows > MAX_FEW_ROWS:
        reason = f"{num_rows} rows are more than {MAX_FEW_ROWS}"
    elif inputs % 16 or outputs % 16:
        reason = f"the sides of a weight {weight.shape} are not multiples of 16"
    elif weight.size >= 2**31:
        reason = f"a weight {weight.shape} has more numbers than an int32 counts"
    if dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        on_triton = f"{dtype.name} rows, {weight.dtype.name} weight: Triton takes bfloat16"
    impl = choose(kernel, impl, reason, on_triton)
    if impl == "xla":
        return impl, None
    tile = tile or few_row_tile(
        rows=num_rows, inputs=inputs, outputs=outputs, device=current_device()
    )
    tile.check(kernel, inputs, outputs)
    if tile.rows < num_rows:
        raise ValueError(f"{kernel}: {tile} does not hold {num_rows} rows")
    return impl, tile


# Jitted so that a step that calls it in each layer traces and lowers it once.
@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def _run(operands, weight, *, tile, interpret):
    """Parts [S, num_rows, N] of x [num_rows, K], or of gates, ups and the layer, [1]."""
    (inputs, outputs), splits = weight.shape, tile.splits
    is_gated, num_blocks = len(operands) > 1, inputs // tile.block
    num_rows, dtype = operands[0].shape[-2], operands[is_gated].dtype
    load = _load_gated if is_gated else _load

    def carat_few_rows(*refs):
        *row_refs, weight_ref, out_ref = refs
        split, column = pl.program_id(1), pl.program_id(0) * tile.columns

        def step(i, total):
            start = (split + i * splits) * tile.block
            rows = load(row_refs, num_rows, start + jnp.arange(tile.block)[None], tile.rows)
            block = weight_ref[pl.ds(start, tile.block), pl.ds(column, tile.columns)]
            return total + plt.dot(rows, block)

        steps = num_blocks if splits == 1 else (num_blocks - split + splits - 1) // splits
        total = lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
        row = jnp.arange(tile.rows)[:, None]
        at = out_ref.at[split, row, column + jnp.arange(tile.columns)[None]]
        plt.store(at, total.astype(out_ref.dtype), mask=row < num_rows)

    return pl.pallas_call(
        carat_few_rows,
        grid=(outputs // tile.columns, splits),
        out_shape=jax.ShapeDtypeStruct(
            (splits, num_rows, outputs), dtype if splits == 1 else jnp.float32
        ),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="carat_gated_rows" if is_gated else "carat_few_rows",
    )(*operands, weight)


def _load(refs, num_rows, column, tile_rows):
    """Some columns of the rows; those of the tile that do not exist are zeros."""
    row = jnp.arange(tile_rows)[:, None]
    return plt.load(refs[0].at[row, column], mask=row < num_rows, other=0.0)


def _load_gated(refs, num_rows, column, tile_rows):
    """The same, gated. Only rows that exist are computed, and stand in for the others."""
    gates_ref, ups_ref, layer_ref = refs
    real, num_parts, dtype = next_power_of_two(num_rows), len(gates_ref), ups_ref.dtype
    row = jnp.arange(real)[:, None]
    exists = row < num_rows
    up = plt.load(ups_ref.at[row, layer_ref[0], column], mask=exists, other=0.0)
    # All parts in one load: in flight together, and moved to where the product wants them once.
    part = jnp.arange(next_power_of_two(num_parts))[:, None, None]
    at = gates_ref.at[part, row[None], column[None]]
    parts = plt.load(at, mask=(part < num_parts) & exists[None], other=0.0)
    gate = jnp.sum(parts.astype(jnp.float32), axis=0).astype(dtype).astype(jnp.float32)
    gated = (gelu(gate) * up.astype(jnp.float32)).astype(dtype)
    copies = jnp.broadcast_to(gated[None], (tile_rows // real, *gated.shape))
    return copies.reshape(tile_rows, -1)
