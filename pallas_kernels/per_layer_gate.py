"""The gate of a per-layer input for a few rows: product, gelu and the input in one launch.

E2B and E4B gate an embedding of 256 numbers in each layer. As separate operations that is the
product, the sum of its splits, gelu and a copy of the layer's part of the inputs, of 1.3 MB in all;
a program here takes all rows, a few columns and every input, and asks for all of its weights at
once, so that few programs are enough.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import reference, tiles
from pallas_kernels.activation import gelu
from pallas_kernels.dispatch import choose
from pallas_kernels.few_rows import sum_blocks
from pallas_kernels.tiles import MAX_FEW_ROWS


def per_layer_gate(x, gate, inputs, layer, *, impl=None, tile=None):
    """gelu(x @ gate) * inputs[..., layer, :].

    Args:
      x: [*rows, D], at most `MAX_FEW_ROWS` rows.
      gate: [D, P].
      inputs: [*rows, L, P], of all layers.
      layer: int32 scalar, the layer whose inputs are gated; it may be traced.
      impl: "triton", "xla", "interpret", or None for Triton on a GPU and xla elsewhere.
      tile: overrides the tile.

    Returns:
      [*rows, P] in x's dtype. The product is rounded to it, and what is returned once more.

    Raises:
      ValueError: the shapes, or they and the tile, contradict each other.
      NotImplementedError: a named impl cannot run this shape, dtype or device.
    """
    (width, gated), num_rows = gate.shape, x.size // x.shape[-1]
    if x.shape[-1] != width or inputs.ndim <= x.ndim or inputs.shape[-1] != gated:
        raise ValueError(f"per_layer_gate: x {x.shape}, gate {gate.shape}, inputs {inputs.shape}")
    if inputs.shape[:-2] != x.shape[:-1]:
        raise ValueError(f"per_layer_gate: inputs {inputs.shape} are not of rows {x.shape[:-1]}")
    reason = on_triton = None
    if num_rows > MAX_FEW_ROWS:
        reason = f"{num_rows} rows are more than {MAX_FEW_ROWS}"
    elif width % 16 or gated % 16:
        reason = f"the sides of a weight {gate.shape} are not multiples of 16"
    if any(array.dtype != jnp.bfloat16 for array in (x, gate, inputs)):
        on_triton = f"{x.dtype.name} rows, {gate.dtype.name} weight: Triton takes bfloat16"
    impl = choose("per_layer_gate", impl, reason, on_triton)
    if impl == "xla":
        return reference.per_layer_gate(x, gate, inputs, layer)
    tile = tile or tiles.per_layer_tile(
        rows=num_rows, inputs=width, outputs=gated, device=tiles.current_device()
    )
    tile.check("per_layer_gate", width, gated)
    layer = jnp.full(1, layer, jnp.int32)
    return _run(x, gate, inputs, layer, tile=tile, interpret=impl == "interpret")


# Jitted so that a step that calls it in each layer traces and lowers it once; layers are arrays.
@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def _run(x, gate, inputs, layer, *, tile, interpret):
    (width, gated), num_rows = gate.shape, x.size // x.shape[-1]

    def carat_per_layer_gate(x_ref, gate_ref, inputs_ref, layer_ref, out_ref):
        row, first = jnp.arange(tile.rows)[:, None], pl.program_id(0) * tile.columns
        column, exists = first + jnp.arange(tile.columns)[None], row < num_rows
        at = inputs_ref.at[row, layer_ref[0], column]
        wanted = plt.load(at, mask=exists, other=0.0).astype(jnp.float32)
        total = sum_blocks(x_ref, gate_ref, first, tile)
        result = gelu(total.astype(x.dtype).astype(jnp.float32)) * wanted
        plt.store(out_ref.at[row, column], result.astype(x.dtype), mask=exists)

    out = pl.pallas_call(
        carat_per_layer_gate,
        grid=(gated // tile.columns,),
        out_shape=jax.ShapeDtypeStruct((num_rows, gated), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="carat_per_layer_gate",
    )(x.reshape(num_rows, width), gate, inputs.reshape(num_rows, -1, gated), layer)
    return out.reshape(*x.shape[:-1], gated)
