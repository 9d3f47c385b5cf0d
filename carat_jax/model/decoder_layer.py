"""One decoder layer of Gemma 4 as Flax NNX modules, named as the checkpoint names them.

A module declares its parameters once (`ParamSpec`: shape, axes, initialiser, and which tensors of
a published checkpoint fill it); loading, random weights, sharding and byte counts all read that
declaration. Fused weights keep their axes apart (`qkv_proj` is `[D, K, G + 2, H]`), so KV heads and
MLP columns can be split over devices. Formulas: transformers 5.17, `modeling_gemma4`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from carat_jax.array_types import (
    Array,
    Branch,
    ExpertIds,
    ExpertWeights,
    Float,
    Hidden,
    Queries,
)
from carat_jax.cache.append import Projection, append_attend, borrow_attend, fits_one_kernel
from carat_jax.cache.bank import Cache
from carat_jax.families import LayerSpec, ModelConfig
from carat_jax.model.moe import Experts, Router
from carat_jax.model.params import TensorSource, matrix, param, vector
from carat_jax.model.step_context import StepContext
from carat_jax.numerics.attention import ChunkView, KeyView, RotatedView, attend
from carat_jax.numerics.layers import (
    few_row_impl,
    gelu_gate,
    joined,
    linear,
    rms_norm,
    rope_frequencies,
    rotate,
)
from carat_jax.numerics.options import ComputeOptions
from pallas_kernels import few_row_parts, gated_row_parts, mixture_norm, residual_norm, tiles


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a plain weight."""

    def __init__(self, name: str, width: int, eps: float, dtype: DTypeLike):
        self.weight = vector(f"{name}.weight", width, dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Normalises the last axis."""
        return rms_norm(x, self.weight.get_value(), self.eps)


class Attention(nnx.Module):
    """Self-attention of one layer: fused projections, head norms, RoPE, cache, softmax, output."""

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike):
        spec, prefix = config.layer(index), f"layers.{index}.self_attn"
        self.spec, self.eps = spec, config.rms_norm_eps
        num_kv, dim, width = spec.num_kv_heads, spec.head_dim, config.hidden_size
        self.group = group = config.num_attention_heads // num_kv
        parts = [("q_proj", slice(0, group))]
        if spec.owns_kv:
            parts.append(("k_proj", slice(group, group + 1)))
            if not spec.k_eq_v:
                parts.append(("v_proj", slice(group + 1, group + 2)))
        num_parts = parts[-1][1].stop

        def source(name: str, where: slice) -> TensorSource:
            heads = where.stop - where.start
            return TensorSource(
                f"{prefix}.{name}.weight",
                shape=(num_kv * heads * dim, width),
                view=(num_kv, heads, dim, width),
                order=(3, 0, 1, 2),
                index=(slice(None), slice(None), where),
            )

        self.qkv_proj = param(
            (width, num_kv, num_parts, dim),
            dtype,
            axes=("embed", "kv_heads", None, None),
            tensors=tuple(source(name, where) for name, where in parts),
        )
        self.o_proj = param(
            (num_kv, group, dim, width),
            dtype,
            axes=("kv_heads", None, None, "embed"),
            fan_in=num_kv * group * dim,
            tensors=(
                TensorSource(
                    f"{prefix}.o_proj.weight",
                    shape=(width, num_kv * group * dim),
                    view=(width, num_kv, group, dim),
                    order=(1, 2, 3, 0),
                ),
            ),
        )
        self.q_norm = RMSNorm(f"{prefix}.q_norm", dim, config.rms_norm_eps, dtype)
        if spec.owns_kv:
            self.k_norm = RMSNorm(f"{prefix}.k_norm", dim, config.rms_norm_eps, dtype)

    def __call__(self, x: Hidden, step: StepContext) -> Branch:
        """Attends from `x` `[B, T, D]`; writes the layer's cache in `step` if it owns one."""
        spec, group = self.spec, self.group
        with jax.named_scope("qkv"):
            fused = linear(x, self.qkv_proj.get_value(), products=step.options.products)
        cache = step.caches.get(spec.index)
        keys = cache if spec.owns_kv else step.views[spec.kv_owner]
        if step.slots is None and fits_one_kernel(keys, x.shape[1], group, step.options):
            with jax.named_scope("attend"):
                out = (self._append if spec.owns_kv else self._borrow)(keys, fused, step)
        else:
            out = self._attend(cache, fused, step)
        with jax.named_scope("o"):
            heads = out.reshape(*x.shape[:2], spec.num_kv_heads, group, spec.head_dim)
            out = linear(
                heads, self.o_proj.get_value(), 3, step.options.products, step.options.joins_rows
            )
            return step.taps.put(f"layers.{spec.index}.attn.out", out)

    def _append(
        self, cache: Cache, fused: Float[Array, "B T K parts H"], step: StepContext
    ) -> Queries:
        """Everything between the projections in one kernel."""
        spec = self.spec
        new = Projection(
            fused,
            self.group,
            self.q_norm.weight.get_value(),
            self.k_norm.weight.get_value(),
            self.eps,
            step.rope[spec.is_sliding],
        )
        cache, out = append_attend(
            cache, new, step.starts, step.num_valid, spec.window, step.options
        )
        step.caches[spec.index] = cache
        step.views[spec.index] = cache.view(step.starts + step.num_valid, None)
        return out

    def _borrow(
        self, view: KeyView, fused: Float[Array, "B T K G H"], step: StepContext
    ) -> Queries:
        """The same where another layer owns the keys."""
        spec, weight = self.spec, self.q_norm.weight.get_value()
        tables, starts = step.rope[spec.is_sliding], step.positions[:, 0]
        return borrow_attend(
            view, fused, weight, self.eps, tables, starts, spec.window, step.options
        )

    def _attend(
        self, cache: Cache | None, fused: Float[Array, "B T K parts H"], step: StepContext
    ) -> Queries:
        """Norms, RoPE, cache rows and attention, one after the other."""
        spec, group, tables = self.spec, self.group, step.rope[self.spec.is_sliding]
        name = f"layers.{spec.index}.attn"
        with jax.named_scope("qkv"):
            q = rotate(self.q_norm(fused[..., :group, :]), tables, dtype=jnp.float32)
        if spec.owns_kv:
            with jax.named_scope("cache"):
                raw_k = fused[..., group, :]
                # Where keys equal values, the value is the raw key projection: not normed by
                # k_norm and not rotated.
                raw_v = raw_k if spec.k_eq_v else fused[..., group + 1, :]
                k, v = rotate(self.k_norm(raw_k), tables), rms_norm(raw_v, eps=self.eps)
                step.taps.put(f"{name}.k", k), step.taps.put(f"{name}.v", v)
                step.caches[spec.index], view = cache.extend(
                    k, v, step.starts, step.num_valid, step.slots, spec.window
                )
                if isinstance(view, RotatedView):
                    view = dataclasses.replace(view, key_weight=self.k_norm.weight.get_value())
                step.views[spec.index] = view
        with jax.named_scope("attend"):
            heads = step.taps.put(f"{name}.q", q.reshape(*q.shape[:2], -1, spec.head_dim))
            view = step.views[spec.kv_owner]
            step.taps.put_attention(name, heads, step.positions, view, spec.window)
            out = attend(heads, step.positions, view, spec.window, step.options)
        if spec.owns_kv and isinstance(view, ChunkView):
            # Rows that wait for what reads the ring before them: free to come first, they would
            # make XLA copy the ring, of every slot.
            k, v, out = jax.lax.optimization_barrier((k, v, out))
            step.caches[spec.index], _ = cache.extend(
                k, v, step.starts, step.num_valid, step.slots, spec.window
            )
        return out


class MLP(nnx.Module):
    """`down(gelu(gate x) * up x)`."""

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike):
        width, mlp, prefix = (
            config.hidden_size,
            config.layer(index).mlp_width,
            f"layers.{index}.mlp",
        )
        self.gate_up_proj = param(
            (width, 2, mlp),
            dtype,
            axes=("embed", None, "mlp"),
            tensors=tuple(
                TensorSource(
                    f"{prefix}.{name}.weight",
                    shape=(mlp, width),
                    view=(mlp, width),
                    order=(1, 0),
                    index=(slice(None), i),
                )
                for i, name in enumerate(("gate_proj", "up_proj"))
            ),
        )
        self.down_proj = matrix(f"{prefix}.down_proj.weight", mlp, width, ("mlp", "embed"), dtype)

    def __call__(self, x: Hidden, products: str, in_parts: bool) -> Branch:
        """Applies the MLP row by row; `products` and `in_parts` are those of `linear`."""
        with jax.named_scope("gate_up"):
            gate_up = linear(x, self.gate_up_proj.get_value(), products=products)
            gated = gelu_gate(gate_up[..., 0, :], gate_up[..., 1, :])
        with jax.named_scope("down"):
            return linear(gated, self.down_proj.get_value(), 1, products, in_parts)


class PerLayerInput(nnx.Module):
    """The gated per-layer embedding that E2B and E4B add after the MLP."""

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike):
        width, ple, prefix = (
            config.hidden_size,
            config.hidden_size_per_layer_input,
            f"layers.{index}",
        )
        self.gate = matrix(
            f"{prefix}.per_layer_input_gate.weight", width, ple, ("embed", None), dtype
        )
        self.projection = matrix(
            f"{prefix}.per_layer_projection.weight", ple, width, (None, "embed"), dtype
        )
        self.norm = RMSNorm(
            f"{prefix}.post_per_layer_input_norm", width, config.rms_norm_eps, dtype
        )
        self.index = index

    def __call__(
        self, x: Hidden, inputs: Float[Array, "B T L P"], products: str, in_parts: bool
    ) -> Branch:
        """What to add, once `norm`ed, to the residual `x` for the layers' `inputs`.

        `products` and `in_parts` are those of `linear`.
        """
        gate, projection = self.gate.get_value(), self.projection.get_value()
        num_rows = x.size // x.shape[-1]
        impl = few_row_impl(products, num_rows, *gate.shape, tiles.per_layer_rows_win)
        if impl == "xla":
            gated = gelu_gate(linear(x, gate), inputs[:, :, self.index])
            return linear(gated, projection)
        gates = few_row_parts(x, gate, impl=impl)
        parts = gated_row_parts(gates, inputs, self.index, projection, impl=impl)
        return joined(parts, projection, in_parts)


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


def layer_frequencies(config: ModelConfig, layer: LayerSpec) -> Float[np.ndarray, "half"]:
    """RoPE frequencies of a layer; see `rope_frequencies`."""
    if layer.is_sliding:
        return rope_frequencies(layer.head_dim, config.sliding_rope_theta)
    return rope_frequencies(
        layer.head_dim, config.full_rope_theta, config.partial_rotary_factor, config.rope_factor
    )
