"""What stands between two products of a layer: norm a branch, add it to the residual, norm the sum.

As separate operations these are eight launches a layer, each over a few kilobytes, and as many
again where the branch is itself the sum of an MLP and of experts. One program takes one row. Every
rounding of the plain code is kept: each normed branch, each sum and the scaled sum are rounded to
the rows' dtype.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import reference
from pallas_kernels.dispatch import choose
from pallas_kernels.tiles import next_power_of_two

MAX_WIDTH = 8192  # float32 numbers of a row that one program keeps in registers


def residual_norm(x, branch, branch_weight, *next_weights, scale=None, eps, impl=None):
    """`y = (x + norm(branch) * branch_weight) * scale`, and `norm(y) * w` for each next weight w.

    Args:
      x: [*rows, D], the residual stream.
      branch: [*rows, D], what attention or the MLP gave; or [S, *rows, D], its S parts, which are
        summed in their order in float32 and rounded.
      branch_weight: [D], of the norm after the branch.
      *next_weights: each [D], of a norm before something that reads the sum.
      scale: [1], the layer's scalar; None is 1.
      eps: added to the mean of the squares.
      impl: "triton", "xla", "interpret", or None for Triton on a GPU and xla elsewhere.

    Returns:
      (y, its norms in order), each [*rows, D] in `x`'s dtype.

    Raises:
      ValueError: the shapes contradict each other.
      NotImplementedError: a named impl cannot run this shape or dtype.
    """
    weights = [branch_weight, *next_weights]
    has_parts = branch.ndim > x.ndim
    if branch.shape[has_parts:] != x.shape or {w.shape for w in weights} != {x.shape[-1:]}:
        raise ValueError(
            f"residual_norm: x {x.shape}, branch {branch.shape} and weights "
            f"{[w.shape for w in weights]} do not match"
        )
    impl = _choose("residual_norm", impl, x)
    if impl == "xla":
        return reference.residual_norm(x, branch, *weights, scale=scale, eps=eps)
    return _residual_norm(x, branch, weights, scale, eps=eps, interpret=impl == "interpret")


def mixture_norm(
    x, dense, shares, chosen, dense_weight, shares_weight, branch_weight, *next_weights,
    num_experts, scale=None, eps, impl=None,
):  # fmt: skip
    """`residual_norm` of `norm(dense) * dense_weight + norm(sum of shares) * shares_weight`.

    Args:
      x: [*rows, D], the residual stream.
      dense: [*rows, D], what the MLP gave.
      shares: float32 [*rows, k, D], what each chosen expert gave, summed in their order.
      chosen: int32 [*rows, k], ids of the experts; E is none, whose share is not looked at.
      dense_weight, shares_weight: [D], of the norms of the two parts.
      branch_weight: [D], of the norm after their sum.
      num_experts: E.
      Else as in `residual_norm`, as are the results and what is raised.
    """
    weights = [dense_weight, shares_weight, branch_weight, *next_weights]
    width, top_k = x.shape[-1], chosen.shape[-1]
    shapes = dense.shape, chosen.shape, shares.shape, *(w.shape for w in weights)
    rows_of = (*x.shape[:-1], top_k), (*x.shape[:-1], top_k, width)
    if shapes != (x.shape, *rows_of, *[(width,)] * len(weights)):
        raise ValueError(
            f"mixture_norm: x {x.shape} does not fit dense, chosen, shares, weights of {shapes}"
        )
    impl = _choose("mixture_norm", impl, x)
    if impl == "xla":
        return reference.mixture_norm(
            x, dense, shares, chosen, *weights, num_experts=num_experts, scale=scale, eps=eps
        )
    return _mixture_norm(
        x, dense, shares, chosen, weights, scale,
        num_experts=num_experts, eps=eps, interpret=impl == "interpret",
    )  # fmt: skip


def _choose(kernel, impl, x):
    """The implementation for rows of this width and dtype."""
    reason = on_triton = None
    if x.shape[-1] > MAX_WIDTH:
        reason = f"rows of {x.shape[-1]} numbers are more than {MAX_WIDTH}"
    if x.dtype != jnp.bfloat16:
        on_triton = f"rows of {x.dtype.name}: Triton takes bfloat16 only"
    return choose(kernel, impl, reason, on_triton)


# Jitted so that a step that calls them in each layer traces and lowers them once.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _residual_norm(x, branch, weights, scale, *, eps, interpret):
    row, num_parts = _Row(x.shape[-1], x.dtype, eps), branch.size // x.size

    def carat_residual_norm(x_ref, branch_ref, weight_refs, scale_refs, *out_refs):
        # All loads first: in flight together, and none behind a sum over the row.
        x, *weights = map(row.load, (x_ref, *weight_refs))
        parts = [row.load(branch_ref, part) for part in range(num_parts)]
        scales = [ref[0] for ref in scale_refs]
        branch = row.rounded(functools.reduce(operator.add, parts))
        row.add_norm(x, branch, weights, scales, out_refs)

    return _call(
        carat_residual_norm, (x,), weights, scale, len(weights),
        parts=[branch.reshape(num_parts, -1, x.shape[-1])], warps=8, interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("num_experts", "eps", "interpret"))
def _mixture_norm(x, dense, shares, chosen, weights, scale, *, num_experts, eps, interpret):
    row = _Row(x.shape[-1], x.dtype, eps)

    def carat_mixture_norm(
        x_ref, dense_ref, shares_ref, chosen_ref, weight_refs, scale_refs, *out_refs
    ):
        x, dense, *weights = map(row.load, (x_ref, dense_ref, *weight_refs))
        dense_weight, shares_weight, *weights = weights
        scales = [ref[0] for ref in scale_refs]
        exists = [chosen_ref[k] < num_experts for k in range(chosen.shape[-1])]
        shares = [row.load(shares_ref, k, exists=found) for k, found in enumerate(exists)]
        experts = row.rounded(functools.reduce(operator.add, shares))
        branch = row.norm(dense, dense_weight) + row.norm(experts, shares_weight)
        row.add_norm(x, row.rounded(branch), weights, scales, out_refs)

    return _call(
        carat_mixture_norm, (x, dense, shares, chosen), weights, scale, len(weights) - 2,
        warps=16, interpret=interpret,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Row:
    """What kernels do with a row of `width` numbers, which they hold in float32."""

    width: int
    dtype: jnp.dtype
    eps: float

    def load(self, ref, *at, exists=True):
        """A row or a weight, at `at` of `ref`; zeros past its end, or if it does not exist."""
        column = jnp.arange(next_power_of_two(self.width))
        mask = (column < self.width) & exists
        return plt.load(ref.at[*at, column], mask=mask, other=0.0).astype(jnp.float32)

    def rounded(self, row):
        """The row as it is in memory where the plain code writes it."""
        return row.astype(self.dtype).astype(jnp.float32)

    def norm(self, row, weight):
        """The normed row, rounded."""
        inverse = lax.rsqrt(jnp.sum(row * row) / self.width + self.eps)
        return self.rounded(row * inverse * weight)

    def add_norm(self, x, branch, weights, scales, out_refs):
        """Stores the sum of `x` and the normed branch, scaled, and norms of it."""
        branch_weight, *next_weights = weights
        y = self.rounded(x + self.norm(branch, branch_weight))
        for scale in scales:
            y = self.rounded(y * scale.astype(jnp.float32))
        column = jnp.arange(next_power_of_two(self.width))
        results = y, *(self.norm(y, weight) for weight in next_weights)
        for ref, result in zip(out_refs, results, strict=True):
            plt.store(ref.at[column], result.astype(self.dtype), mask=column < self.width)


def _call(kernel, arrays, weights, scale, num_results, *, parts=(), warps, interpret):
    """pallas_call of kernel(row of each array, weights, [scale] or [], results), a program a row.

    The first array is `x`, and every result is like it. Arrays of `parts`, [S, num_rows, D] as
    products write them, come after `arrays`, a row of each part.
    """
    x, num_rows = arrays[0], arrays[0].size // arrays[0].shape[-1]
    flat = [array.reshape(num_rows, *array.shape[x.ndim - 1 :]) for array in arrays]
    vectors = weights, [] if scale is None else [scale]

    def one(array):
        return pl.BlockSpec((None, *array.shape[1:]), lambda i: (i, *[0] * (array.ndim - 1)))

    def each(array):
        return pl.BlockSpec((array.shape[0], None, array.shape[2]), lambda i: (0, i, 0))

    def whole(array):
        return pl.BlockSpec(array.shape, lambda i: (0,))

    results = pl.pallas_call(
        kernel,
        grid=(num_rows,),
        in_specs=(*map(one, flat), *map(each, parts), *jax.tree.map(whole, vectors)),
        out_specs=[one(flat[0])] * num_results,
        out_shape=[jax.ShapeDtypeStruct(flat[0].shape, x.dtype)] * num_results,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=kernel.__name__,
    )(*flat, *parts, *vectors)
    return tuple(result.reshape(x.shape) for result in results)
