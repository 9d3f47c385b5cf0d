"""One decoder layer of Gemma 4 as Flax NNX modules, named as the checkpoint names them.

A module declares its parameters once (`ParamSpec`: shape, axes, initialiser, and which tensors of
a published checkpoint fill it); loading, random weights, sharding and byte counts all read that
declaration. Formulas: transformers 5.17, `modeling_gemma4`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from carat_jax.array_types import Array, ExpertIds, ExpertWeights, Float, Hidden
from carat_jax.families import ModelConfig
from carat_jax.model.mlp import MLP, PerLayerInput
from carat_jax.model.moe import Experts, Router
from carat_jax.model.norm import RMSNorm, add_norm
from carat_jax.model.params import vector
from carat_jax.model.self_attention import Attention
from carat_jax.model.step_context import StepContext
from pallas_kernels import mixture_norm


class DecoderLayer(nnx.Module):
    """One layer: attention and MLP, each between two norms, and the trained residual scale.

    Where the model has experts, they and the MLP run side by side, each with norms of its own.
    """

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike):
        def norm(name: str) -> RMSNorm:
            return RMSNorm(f"{self.name}.{name}", config.hidden_size, config.rms_norm_eps, dtype)

        self.name = f"layers.{index}"
        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Attention(config, index, dtype)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = MLP(config, index, dtype)
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        has_experts = config.layer(index).num_experts > 0
        self.router = Router(config, index, dtype) if has_experts else None
        self.experts = Experts(config, index, dtype) if has_experts else None
        if has_experts:
            self.post_feedforward_layernorm_1 = norm("post_feedforward_layernorm_1")
            self.pre_feedforward_layernorm_2 = norm("pre_feedforward_layernorm_2")
            self.post_feedforward_layernorm_2 = norm("post_feedforward_layernorm_2")
        self.per_layer_input = (
            PerLayerInput(config, index, dtype) if config.hidden_size_per_layer_input else None
        )
        self.layer_scalar = vector(f"{self.name}.layer_scalar", 1, dtype)

    def __call__(
        self,
        x: Hidden,
        normed: Hidden,
        per_layer: Float[Array, "B T L P"] | None,
        step: StepContext,
        next_norm: RMSNorm,
    ) -> tuple[Hidden, Hidden]:
        """One layer.

        Args:
          x: the residual stream.
          normed: `input_layernorm(x)`: every norm of the stream is taken where the stream is
            summed, so that both are one pass over it.
          per_layer: the layers' inputs.
          step: what the layers of the step share.
          next_norm: the norm of whatever reads the result.

        Returns:
          The residual stream after the layer, and `next_norm` of it.
        """
        scalar = self.layer_scalar.get_value()
        before = [self.pre_feedforward_layernorm]
        if self.experts is not None:
            before.append(self.pre_feedforward_layernorm_2)
        attended, norm = self.self_attn(normed, step), self.post_attention_layernorm
        x, normed, *for_experts = add_norm(x, attended, norm, before, step.options)
        with jax.named_scope("mlp"):
            in_parts = step.options.joins_rows and self.experts is None
            branch = self.mlp(normed, step.options.products, in_parts)
            step.taps.put(f"{self.name}.mlp.out", branch)
            if self.experts is not None:
                routed = self._route(x, step)
                if step.options.joins_experts and self.per_layer_input is None:
                    return self._add_mixture(x, branch, *for_experts, *routed, step, next_norm)
                branch = self.post_feedforward_layernorm_1(branch)
                branch += self._mixture(*for_experts, *routed, step)
            norm = self.post_feedforward_layernorm
            if self.per_layer_input is None:
                return add_norm(x, branch, norm, [next_norm], step.options, scalar)
            (x,) = add_norm(x, branch, norm, [], step.options)
        with jax.named_scope("per_layer_input"):
            products, in_parts = step.options.products, step.options.joins_rows
            branch = self.per_layer_input(x, per_layer, products, in_parts)
            step.taps.put(f"{self.name}.per_layer.out", branch)
            return add_norm(x, branch, self.per_layer_input.norm, [next_norm], step.options, scalar)

    def _route(self, x: Hidden, step: StepContext) -> tuple[ExpertWeights, ExpertIds]:
        """The experts of the residual `x`: the router sees it un-normed."""
        with jax.named_scope("experts"):
            is_token = jnp.arange(x.shape[1]) < step.num_valid[:, None]
            weights, chosen = self.router(x, step.options.experts, is_token)
            step.taps.put(f"{self.name}.router.weights", weights)
            step.taps.put(f"{self.name}.router.experts", chosen)
            return weights, chosen

    def _mixture(
        self, normed: Hidden, weights: ExpertWeights, chosen: ExpertIds, step: StepContext
    ) -> Hidden:
        """The experts' part of the branch."""
        with jax.named_scope("experts"):
            mixed = self.experts(normed, weights, chosen, step.options.experts)
            step.taps.put(f"{self.name}.experts.out", mixed)
            return self.post_feedforward_layernorm_2(mixed)

    def _add_mixture(
        self,
        x: Hidden,
        dense: Hidden,
        normed: Hidden,
        weights: ExpertWeights,
        chosen: ExpertIds,
        step: StepContext,
        next_norm: RMSNorm,
    ) -> tuple[Hidden, Hidden]:
        """The layer's end, with all that follows the last products in one kernel."""
        with jax.named_scope("experts"):
            shares = self.experts.shares(normed, weights, chosen, step.options.experts)
        norms = (
            self.post_feedforward_layernorm_1,
            self.post_feedforward_layernorm_2,
            self.post_feedforward_layernorm,
            next_norm,
        )
        with jax.named_scope("norm"):
            return mixture_norm(
                x, dense, shares, chosen, *(norm.weight.get_value() for norm in norms),
                num_experts=self.router.num_experts, scale=self.layer_scalar.get_value(),
                eps=next_norm.eps, impl=step.options.impl,
            )  # fmt: skip


def run_layers(
    layers: Sequence[DecoderLayer],
    x: Hidden,
    per_layer: Float[Array, "B T L P"] | None,
    step: StepContext,
    final_norm: RMSNorm,
    scope: str,
    last_rows_from: int | None = None,
) -> Float[Array, "B rows D"]:
    """The final-normed state after all `layers`, `[B, T, D]` or of last rows `[B, 1, D]`.

    Args:
      layers: in order.
      x: the residual stream `[B, T, D]`.
      per_layer: the layers' inputs.
      step: what the layers share.
      final_norm: the norm after the last one.
      scope: names each in profiles.
      last_rows_from: the layer from which on each slot's last real row alone is wanted, which may
        be one past the last; None is none.
    """
    normed = layers[0].input_layernorm(x)
    next_norms = [*(layer.input_layernorm for layer in layers[1:]), final_norm]
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        if index == last_rows_from:
            x, normed = step.last_rows(x), step.last_rows(normed)
            per_layer = None if per_layer is None else step.last_rows(per_layer)
            step = step.of_last_rows()
        with jax.named_scope(f"{scope}_{index}"):
            x, normed = layer(x, normed, per_layer, step, next_norm)
            step.taps.put(f"{layer.name}.residual", x)
    return step.last_rows(normed) if last_rows_from == len(layers) else normed
