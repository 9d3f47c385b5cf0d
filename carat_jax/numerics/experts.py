"""Products of tokens with the experts they chose: plain JAX in two forms, or the Pallas kernel.

Every form computes the same sum, in bfloat16 with float32 accumulation or in float32:

    out[r] = sum over k of weights[r, k] * down(gelu(gate x[r]) * up x[r]) by expert chosen[r, k]

`dense` lets every expert see every token and keeps what was chosen: it reads all weights and wastes
num_experts / top_k of the arithmetic. `ragged_dot` sorts the (token, expert) pairs by expert for
`jax.lax.ragged_dot_general`, which lowers to grouped products where the compiler has them and to
every expert for every *pair* elsewhere. The kernel reads chosen experts only. Nothing falls back.
"""

import jax.numpy as jnp
from jax import lax

from carat_jax.array_types import Array, Float, Int
from carat_jax.numerics.layers import gelu_gate, precision, product, widened_on_cpu
from pallas_kernels import expert_mlp as kernel


def expert_mlp(
    x: Float[Array, "rows D"],
    weights: Float[Array, "rows k"],
    chosen: Int[Array, "rows k"],
    gate_up: Float[Array, "E 2 F D"],
    down: Float[Array, "E D F"],
    impl: str,
) -> Float[Array, "rows D"]:
    """The weighted sum of what its chosen experts make of every row.

    Args:
      x: tokens, normed.
      weights: how much each choice counts, float32.
      chosen: ids of the experts, all different in a row; E, one past the last, is no choice.
      gate_up: gate and up matrices, `[out, in]`.
      down: down matrices, `[out, in]`.
      impl: "dense", "ragged_dot", or "triton" or "interpret" for the kernel.

    Returns:
      In `x`'s type; zeros for a row without a choice, whatever it holds. Weights that are not
      finite reach every row in plain JAX, and with the kernel those that chose them.

    Raises:
      ValueError: there is no such `impl`.
      NotImplementedError: the kernel cannot run this shape, dtype or device.
    """
    match impl:
        case "dense":
            return _dense(x, weights, chosen, gate_up, down)
        case "ragged_dot":
            return _ragged(x, weights, chosen, gate_up, down)
        case "triton" | "interpret":
            return kernel(x, weights, chosen, gate_up, down, impl=impl)
    raise ValueError(
        f"expert_mlp: impl={impl!r} is not one of dense, ragged_dot, triton, interpret"
    )


def _dense(x, weights, chosen, gate_up, down):
    """Every expert for every row; what a row did not choose counts nothing.

    Each expert multiplies with its matrices as they lie: a product over experts and columns at once
    would make XLA transpose all of them first, on a CPU those of every layer.
    """
    rows, num_experts = len(x), len(gate_up)
    share = jnp.zeros((rows, num_experts), jnp.float32)
    share = share.at[jnp.arange(rows)[:, None], chosen].set(weights, mode="drop").T[:, None]
    both = product("eufd,rd->eufr", gate_up, x)
    gated = jnp.where(share != 0, gelu_gate(both[:, 0], both[:, 1]) * share, 0)
    return product("edf,efr->edr", down, gated.astype(x.dtype)).sum(0).T.astype(x.dtype)


def _ragged(x, weights, chosen, gate_up, down):
    """Pairs sorted by expert; those without one come last and belong to no group."""
    num_experts, top_k = len(gate_up), chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=num_experts + 1)[:num_experts]
    packed = gate_up.reshape(num_experts, -1, x.shape[1])
    both = _grouped_product(x[order // top_k], packed, sizes).reshape(len(order), 2, -1)
    gated = gelu_gate(both[:, 0], both[:, 1]).astype(x.dtype)
    parts = _grouped_product(gated, down, sizes)[jnp.argsort(order)].reshape(*chosen.shape, -1)
    parts = jnp.where((chosen < num_experts)[..., None], parts * weights[..., None], 0)
    return parts.sum(1).astype(x.dtype)


def _grouped_product(
    rows: Float[Array, "pairs n"], weights: Float[Array, "E m n"], sizes: Int[Array, "E"]
) -> Float[Array, "pairs m"]:
    """Consecutive groups of `sizes` rows, each times the transpose of its matrix, float32."""
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )

    def multiply(rows: Array, weights: Array) -> Array:
        return lax.ragged_dot_general(
            rows,
            weights,
            sizes,
            dimensions,
            precision=precision(rows.dtype),
            preferred_element_type=jnp.float32,
        )

    return widened_on_cpu(multiply, rows, weights)
