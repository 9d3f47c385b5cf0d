"""The norm of Gemma 4, and its place between a branch and the residual stream."""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.typing import DTypeLike

from carat_jax.array_types import Array, Branch, Float, Hidden
from carat_jax.model.params import vector
from carat_jax.numerics.layers import rms_norm
from carat_jax.numerics.options import ComputeOptions
from pallas_kernels import residual_norm


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a plain weight."""

    def __init__(self, name: str, width: int, eps: float, dtype: DTypeLike):
        self.weight = vector(f"{name}.weight", width, dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Normalises the last axis."""
        return rms_norm(x, self.weight.get_value(), self.eps)


def add_norm(
    x: Hidden,
    branch: Branch,
    norm: RMSNorm,
    next_norms: Sequence[RMSNorm],
    options: ComputeOptions,
    scalar: Float[Array, "1"] | None = None,
) -> tuple[Hidden, ...]:
    """`(x + norm(branch)) * scalar`, and each of `next_norms` of it."""
    if not options.joins_rows:
        x = x + norm(branch)
        x = x if scalar is None else x * scalar
        return x, *(next_norm(x) for next_norm in next_norms)
    with jax.named_scope("norm"):
        weights = (each.weight.get_value() for each in (norm, *next_norms))
        return residual_norm(x, branch, *weights, scale=scalar, eps=norm.eps, impl=options.impl)
