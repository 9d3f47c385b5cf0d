"""A mixture of experts beside the dense MLP: which experts a token takes, and what they add.

    r = router.proj(RMS(a) * router.scale / sqrt(D)),  a the residual after attention, not normed
    w = softmax over all experts of r, the k best of it, renormalised, times router.per_expert_scale
    e = sum over the k experts of w * down(gelu(gate z) * up z),  z = pre_feedforward_layernorm_2(a)

The router is computed in float32 from the residual on: a choice that rounding turns moves the
layer's output by far more than rounding itself. Formulas: transformers 5.17, `modeling_gemma4`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from carat_jax.array_types import Array, Bool, ExpertIds, ExpertWeights, Float, Hidden
from carat_jax.families import ModelConfig
from carat_jax.model.params import TensorSource, param, vector
from carat_jax.numerics.experts import expert_mlp
from carat_jax.numerics.layers import product, rms_norm
from pallas_kernels import expert_shares, route_experts
from pallas_kernels.product_tiles import FEW_TOKENS


class Router(nnx.Module):
    """Chooses every token's experts and how much each counts."""

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike):
        spec, prefix, width = config.layer(index), f"layers.{index}.router", config.hidden_size
        self.num_experts, self.top_k = spec.num_experts, spec.top_k_experts
        self.eps, self.factor = config.rms_norm_eps, width**-0.5
        shape = (spec.num_experts, width)
        self.proj = param(
            shape,
            dtype,
            axes=(None, "embed"),
            fan_in=width,
            tensors=(TensorSource(f"{prefix}.proj.weight", shape),),
        )
        self.scale = vector(f"{prefix}.scale", width, dtype)
        self.per_expert_scale = vector(f"{prefix}.per_expert_scale", spec.num_experts, dtype)

    def __call__(
        self, x: Hidden, impl: str = "dense", is_token: Bool[Array, "B T"] | None = None
    ) -> tuple[ExpertWeights, ExpertIds]:
        """Weights, float32, and ids of each token's experts, the likeliest first.

        Of experts with equal scores the one with the lower id comes first; rows that hold no token
        choose nobody, so that nothing is read for them. `impl` is that of the experts: a few rows
        go through the kernel where theirs do.
        """
        scale, proj = self.scale.get_value(), self.proj.get_value()
        expert_scale = self.per_expert_scale.get_value()
        if impl in ("triton", "interpret") and x.shape[0] * x.shape[1] <= FEW_TOKENS:
            routed = route_experts(
                x.reshape(-1, x.shape[-1]), scale, proj, expert_scale,
                None if is_token is None else is_token.reshape(-1),
                top_k=self.top_k, eps=self.eps, impl=impl,
            )  # fmt: skip
            return tuple(found.reshape(*x.shape[:2], -1) for found in routed)
        normed = rms_norm(x.astype(jnp.float32), eps=self.eps)
        normed *= scale.astype(jnp.float32) * self.factor
        scores = product("btd,ed->bte", normed, proj.astype(jnp.float32))
        top, chosen = lax.top_k(scores, self.top_k)
        # The k best of a softmax, renormalised, are the softmax of the k best scores.
        weights = jax.nn.softmax(top) * expert_scale.astype(jnp.float32)[chosen]
        if is_token is not None:
            chosen = jnp.where(is_token[..., None], chosen, self.num_experts)
        return weights, chosen


class Experts(nnx.Module):
    """The experts' weights, packed as the checkpoint packs them: each `[out, in]`, all in one."""

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike):
        spec, prefix, width = config.layer(index), f"layers.{index}.experts", config.hidden_size
        count, mlp = spec.num_experts, spec.expert_width
        self.gate_up_proj = param(
            (count, 2, mlp, width),
            dtype,
            axes=("experts", None, None, "embed"),
            fan_in=width,
            tensors=(
                TensorSource(
                    f"{prefix}.gate_up_proj",
                    shape=(count, 2 * mlp, width),
                    view=(count, 2, mlp, width),
                ),
            ),
        )
        self.down_proj = param(
            (count, width, mlp),
            dtype,
            axes=("experts", "embed", None),
            fan_in=mlp,
            tensors=(TensorSource(f"{prefix}.down_proj", (count, width, mlp)),),
        )

    def __call__(self, x: Hidden, weights: ExpertWeights, chosen: ExpertIds, impl: str) -> Hidden:
        """The weighted sum of what each token's experts make of it."""
        return expert_mlp(*self._arguments(x, weights, chosen), impl).reshape(x.shape)

    def shares(
        self, x: Hidden, weights: ExpertWeights, chosen: ExpertIds, impl: str
    ) -> Float[Array, "B T k D"]:
        """That sum's terms by the kernel, float32, undefined where nobody is chosen."""
        shares = expert_shares(*self._arguments(x, weights, chosen), impl=impl)
        return shares.reshape(*chosen.shape, -1)

    def _arguments(self, x: Hidden, weights: ExpertWeights, chosen: ExpertIds) -> tuple[Array, ...]:
        """Tokens, weights and choices row by row, and the matrices."""
        rows = (array.reshape(-1, array.shape[-1]) for array in (x, weights, chosen))
        return *rows, self.gate_up_proj.get_value(), self.down_proj.get_value()
