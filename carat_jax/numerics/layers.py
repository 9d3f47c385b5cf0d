"""The arithmetic of a layer outside attention: norms, RoPE, products with weights, the soft cap.

Pure functions of arrays. Everything that a bfloat16 model must not round on the way (norms,
rotations, the head and its cap) is computed in float32 and rounded once, at the end.
The formulas are those of transformers 5.17 (`modeling_gemma4`), where Gemma 4 differs from its
predecessors: norm weights multiply as they are, without one added, and scores are not scaled.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from carat_jax.array_types import Array, Float, Int
from pallas_kernels import few_row_parts, product_tiles, sum_parts, tiles


def precision(dtype: DTypeLike) -> lax.Precision | None:
    """Matmul precision for operands of `dtype`.

    A float32 product on a GPU would otherwise run in TF32, whose 10-bit mantissa is coarser than
    the differences float32 is asked for here. bfloat16 products accumulate in float32 regardless.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


@jax.named_scope("norm")
def rms_norm(
    x: Float[Array, "*rows H"], weight: Float[Array, "H"] | None = None, eps: float = 1e-6
) -> Float[Array, "*rows H"]:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32, rounded once.

    Reducing in bfloat16 loses deep layers whose residual has channels far above the rest.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if weight is not None:
        normed = normed * weight.astype(jnp.float32)
    return normed.astype(x.dtype)


def rope_frequencies(
    head_dim: int, theta: float, partial: float = 1.0, factor: float = 1.0
) -> Float[np.ndarray, "half"]:
    """Angular frequency of each of the `head_dim / 2` rotated pairs, in radians per position.

    With `partial` < 1 ("proportional" RoPE) only the first `partial * head_dim / 2` pairs turn and
    the rest stand still; the exponent's denominator stays the whole head dimension.
    """
    live = int(partial * head_dim // 2)
    exponents = np.arange(live, dtype=np.float64) * 2 / head_dim
    frequencies = np.zeros(head_dim // 2)
    frequencies[:live] = theta**-exponents / factor
    return frequencies.astype(np.float32)


def rope_tables(
    positions: Int[Array, "B T"], frequencies: Float[np.ndarray, "half"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of every position's angles, float32."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


@jax.named_scope("rope")
def rotate(
    x: Float[Array, "B T *heads H"],
    tables: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
    dtype: DTypeLike | None = None,
) -> Float[Array, "B T *heads H"]:
    """Applies RoPE: dimension i turns with dimension i + H/2. In float32, rounded to `dtype`."""
    heads = tuple(range(2, x.ndim - 1))
    cos, sin = (jnp.expand_dims(table, heads) for table in tables)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(dtype or x.dtype)


def linear(
    x: Float[Array, "..."],
    weight: Any,
    num_in: int = 1,
    products: str = "xla",
    in_parts: bool = False,
) -> Array:
    """Product of the last `num_in` axes of `x` with the first `num_in` axes of `weight`.

    Every product with a weight goes through here, so that a weight stored in another form than a
    plain array needs one more case in this function and nowhere else.

    Args:
      x: the rows.
      weight: the parameter.
      num_in: axes that are summed over.
      products: who multiplies few rows, as in `ComputeOptions`.
      in_parts: return what the kernel's splits leave, `[parts, ...]`, for `residual_norm` to sum. A
        product without parts is returned whole.
    """
    if not isinstance(weight, jax.Array):
        raise TypeError(f"no product with a weight of type {type(weight).__name__}")
    shape = *x.shape[: x.ndim - num_in], *weight.shape[num_in:]
    width = int(np.prod(weight.shape[:num_in]))
    # One flat product: XLA chooses its matrix kernels by the two-dimensional shape.
    x, weight = x.reshape(*x.shape[: x.ndim - num_in], width), weight.reshape(width, -1)
    impl = few_row_impl(products, x.size // width, *weight.shape)
    if impl == "xla":
        return jnp.matmul(x, weight, precision=precision(x.dtype)).reshape(shape)
    parts = few_row_parts(x, weight, impl=impl)
    return joined(parts.reshape(len(parts), *shape), weight, in_parts)


def joined(parts: Float[Array, "parts ..."], weight: Float[Array, "F D"], in_parts: bool) -> Array:
    """Parts of a product with `weight` as they are, or their sum, rounded to its type."""
    return parts if in_parts else sum_parts(parts, weight.dtype)


def few_row_impl(
    products: str,
    rows: int,
    inputs: int,
    outputs: int,
    wins: Callable[..., bool] = product_tiles.few_rows_win,
) -> str:
    """Who multiplies: "xla", or the kernel of few rows by "triton" or "interpret".

    Args:
      products: as in `ComputeOptions`.
      rows, inputs, outputs: of the product.
      wins: the rule for "measured".
    """
    if products == "measured":
        shape = {"rows": rows, "inputs": inputs, "outputs": outputs}
        return "triton" if wins(**shape, device=tiles.current_device()) else "xla"
    return products if rows <= product_tiles.MAX_FEW_ROWS else "xla"


def embed(tokens: Int[Array, "B T"], table: Float[Array, "V D"], factor: float) -> Array:
    """Rows of the embedding table times `factor`, which is rounded to the table's type first."""
    return table[tokens] * jnp.asarray(factor, table.dtype)


def scale(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """`x * factor` with one rounding: JAX by itself would first round the factor to `x`'s type."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def product(subscripts: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Array:
    """`einsum` of two arrays of one type, accumulated and returned in float32."""

    def multiply(a: Array, b: Array) -> Array:
        return jnp.einsum(
            subscripts, a, b, precision=precision(a.dtype), preferred_element_type=jnp.float32
        )

    return widened_on_cpu(multiply, a, b)


def widened_on_cpu(
    multiply: Callable[[Array, Array], Array], a: Float[Array, "..."], b: Float[Array, "..."]
) -> Array:
    """`multiply(a, b)`, a product that returns float32, with both widened first on a CPU.

    XLA's CPU backend has no such bfloat16 product for every shape; widening is exact and the sum
    the same.
    """
    if a.dtype == jnp.float32:
        return multiply(a, b)
    return lax.platform_dependent(
        a,
        b,
        cpu=lambda a, b: multiply(a.astype(jnp.float32), b.astype(jnp.float32)),
        default=multiply,
    )


def tied_head(hidden: Float[Array, "*rows D"], table: Float[Array, "V D"]) -> Array:
    """Logits against the unscaled embedding table, float32."""
    return product("...d,vd->...v", hidden, table)


def soft_cap(logits: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """`cap * tanh(logits / cap)`; bfloat16 would merge most of the values near the cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


@jax.named_scope("gelu")
def gelu_gate(
    gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]
) -> Float[Array, "*rows F"]:
    """`gelu(gate) * up` with the tanh approximation of GELU, in float32, rounded once.

    Left to bfloat16 the polynomial inside rounds at every term, 1.9 times the error of one
    rounding.
    """
    gated = jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up
    return gated.astype(up.dtype)
