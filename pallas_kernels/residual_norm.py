"""What stands between two products of a layer: norm a branch, add it to the residual, norm the sum.

As separate operations these are eight launches a layer, each over a few kilobytes. One program
takes one row. Every rounding of the plain code is kept: the normed branch, the sum and the scaled
sum are each rounded to the rows' dtype.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import reference
from pallas_kernels.dispatch import choose
from pallas_kernels.early_start import can_start_early, start_next_kernel
from pallas_kernels.tiles import next_power_of_two

MAX_WIDTH = 8192  # float32 numbers of a row that one program keeps in registers


def residual_norm(x, branch, branch_weight, next_weight, scale=None, *, eps, impl=None):
    """`y = (x + norm(branch) * branch_weight) * scale`, and `norm(y) * next_weight`.

    Args:
      x: [*rows, D], the residual stream.
      branch: [*rows, D], what attention or the MLP gave.
      branch_weight: [D], of the norm after the branch.
      next_weight: [D], of the norm before what reads the sum.
      scale: [1], the layer's scalar; None is 1.
      eps: added to the mean of the squares.
      impl: "triton", "xla", "interpret", or None for Triton on a GPU and xla elsewhere.

    Returns:
      (y, its norm), both [*rows, D] in `x`'s dtype.

    Raises:
      NotImplementedError: a named impl cannot run this shape or dtype.
    """
    if branch.shape != x.shape or {branch_weight.shape, next_weight.shape} != {x.shape[-1:]}:
        raise ValueError(
            f"residual_norm: x {x.shape}, branch {branch.shape}, weights {branch_weight.shape} and "
            f"{next_weight.shape} do not match"
        )
    width, reason, on_triton = x.shape[-1], None, None
    if width > MAX_WIDTH:
        reason = f"rows of {width} numbers are more than {MAX_WIDTH}"
    if x.dtype != jnp.bfloat16:
        on_triton = f"rows of {x.dtype.name}: Triton takes bfloat16 only"
    impl = choose("residual_norm", impl, reason, on_triton)
    if impl == "xla":
        return reference.residual_norm(x, branch, branch_weight, next_weight, scale, eps=eps)
    rows = x.size // width
    row = pl.BlockSpec((None, width), lambda i: (i, 0))
    vector = pl.BlockSpec((width,), lambda i: (0,))
    scalars = [] if scale is None else [scale]
    y, normed = pl.pallas_call(
        _kernel(width, eps, can_start_early(impl)),
        grid=(rows,),
        in_specs=[row, row, vector, vector, *[pl.BlockSpec((1,), lambda i: (0,)) for _ in scalars]],
        out_specs=[row, row],
        out_shape=[jax.ShapeDtypeStruct((rows, width), x.dtype)] * 2,
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=impl == "interpret",
        name="carat_residual_norm",
    )(x.reshape(rows, width), branch.reshape(rows, width), branch_weight, next_weight, *scalars)
    return y.reshape(x.shape), normed.reshape(x.shape)


def _kernel(width, eps, is_early):
    """The kernel of one row, under the name that profilers show."""

    def carat_residual_norm(x_ref, branch_ref, branch_weight_ref, next_weight_ref, *refs):
        *scalars, y_ref, normed_ref = refs
        column = start_next_kernel(jnp.arange(next_power_of_two(width)), is_early)
        valid = column < width

        def load(ref):
            return plt.load(ref.at[column], mask=valid, other=0.0).astype(jnp.float32)

        def norm(row, weight):
            inverse = lax.rsqrt(jnp.sum(row * row) / width + eps)
            return (row * inverse * weight).astype(y_ref.dtype)

        x, branch = load(x_ref), load(branch_ref)
        branch_weight, next_weight = load(branch_weight_ref), load(next_weight_ref)
        y = x + norm(branch, branch_weight).astype(jnp.float32)
        for ref in scalars:
            y = y.astype(y_ref.dtype).astype(jnp.float32) * ref[0].astype(jnp.float32)
        y = y.astype(y_ref.dtype)
        plt.store(y_ref.at[column], y, mask=valid)
        normed = norm(y.astype(jnp.float32), next_weight)
        plt.store(normed_ref.at[column], normed, mask=valid)

    return carat_residual_norm
