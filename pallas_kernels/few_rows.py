"""Products of a few rows with a large weight, of which a decode or verify step mostly consists.

A program takes all rows and a tile of the columns, and walks the inputs: all of them, or the blocks
of one split where the columns alone are too few to give every multiprocessor a program. What splits
leave are float32 parts of the sum, which whoever reads the product sums in their order:
`residual_norm` as it loads them, one more pass elsewhere.

Rows come in tiles of 16 or 32, which the matrix instructions sum alike: a row's bits do not depend
on how many rows there are. No atomics.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import reference, tiles
from pallas_kernels.dispatch import choose
from pallas_kernels.tiles import MAX_FEW_ROWS


def few_row_product(x, weight, *, impl=None, tile=None):
    """x @ weight, accumulated in float32 and rounded once: the sum of `few_row_parts`.

    Returns [*rows, N] in x's dtype; arguments and errors are those of `few_row_parts`.
    """
    parts = few_row_parts(x, weight, impl=impl, tile=tile)
    return functools.reduce(operator.add, parts).astype(x.dtype)


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
    (inputs, outputs), num_rows = weight.shape, x.size // x.shape[-1]
    reason = on_triton = None
    if num_rows > MAX_FEW_ROWS:
        reason = f"{num_rows} rows are more than {MAX_FEW_ROWS}"
    elif inputs % 16 or outputs % 16:
        reason = f"the sides of a weight {weight.shape} are not multiples of 16"
    elif weight.size >= 2**31:
        reason = f"a weight {weight.shape} has more numbers than an int32 counts"
    if any(array.dtype != jnp.bfloat16 for array in (x, weight)):
        on_triton = f"{x.dtype.name} rows, {weight.dtype.name} weight: Triton takes bfloat16"
    impl = choose("few_row_product", impl, reason, on_triton)
    if impl == "xla":
        return reference.few_row_product(x, weight)[None]
    tile = tile or tiles.few_row_tile(
        rows=num_rows, inputs=inputs, outputs=outputs, device=tiles.current_device()
    )
    tile.check("few_row_product", inputs, outputs)
    if tile.rows < num_rows:
        raise ValueError(f"few_row_product: {tile} does not hold {num_rows} rows")
    return _run(x, weight, tile=tile, interpret=impl == "interpret")


# Jitted so that a step that calls it in each layer traces and lowers it once.
@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def _run(x, weight, *, tile, interpret):
    (inputs, outputs), num_rows, splits = weight.shape, x.size // x.shape[-1], tile.splits

    def carat_few_rows(x_ref, weight_ref, out_ref):
        split, row = pl.program_id(1), jnp.arange(tile.rows)[:, None]
        column = pl.program_id(0) * tile.columns
        total = sum_blocks(x_ref, weight_ref, column, tile, split)
        at = out_ref.at[split, row, column + jnp.arange(tile.columns)[None]]
        plt.store(at, total.astype(out_ref.dtype), mask=row < num_rows)

    dtype = x.dtype if splits == 1 else jnp.float32
    parts = pl.pallas_call(
        carat_few_rows,
        grid=(outputs // tile.columns, splits),
        out_shape=jax.ShapeDtypeStruct((splits, num_rows, outputs), dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="carat_few_rows",
    )(x.reshape(num_rows, inputs), weight)
    return parts.reshape(splits, *x.shape[:-1], outputs)


def sum_blocks(x_ref, weight_ref, column, tile, split=0):
    """A split's part of the product of all rows with a tile of columns from `column` on, float32.

    Rows of the tile beyond those of `x_ref` are zeros.
    """
    num_rows, inputs = x_ref.shape
    num_blocks, splits = inputs // tile.block, tile.splits
    row = jnp.arange(tile.rows)[:, None]

    def step(i, total):
        start = (split + i * splits) * tile.block
        at = x_ref.at[row, start + jnp.arange(tile.block)[None]]
        rows = plt.load(at, mask=row < num_rows, other=0.0)
        block = weight_ref[pl.ds(start, tile.block), pl.ds(column, tile.columns)]
        return total + plt.dot(rows, block)

    steps = num_blocks if splits == 1 else (num_blocks - split + splits - 1) // splits
    return lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
