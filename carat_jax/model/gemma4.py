"""The Gemma 4 text model as Flax NNX modules, named as the checkpoint names them.

A module declares its parameters once (`ParamSpec`: shape, axes, initialiser, and which tensors of
a published checkpoint fill it); loading, random weights, sharding and byte counts all read that
declaration. Modules are built without arrays: `nnx.split(Gemma4(config, dtype))` gives a graph and
a tree of shapes, and a step merges the graph with real arrays inside `jit`.

Fused weights keep their axes apart (`qkv_proj` is `[D, K, G + 2, H]`), so KV heads and MLP columns
can be split over devices. Formulas: transformers 5.17, `modeling_gemma4`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from carat_jax.array_types import Array, Float, Hidden, Int, Lengths, Slots, Tokens
from carat_jax.cache.bank import CacheBank
from carat_jax.families import LayerSpec, ModelConfig
from carat_jax.model.moe import Experts, Router
from carat_jax.model.params import TensorSource, matrix, param, vector
from carat_jax.model.taps import NO_TAPS, Taps
from carat_jax.numerics.attention import KeyView, RotatedView, attend
from carat_jax.numerics.layers import (
    embed,
    gelu_gate,
    linear,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate,
    scale,
    soft_cap,
    tied_head,
)
from carat_jax.numerics.options import PLAIN, ComputeOptions


@dataclasses.dataclass
class StepContext:
    """What every layer of one step shares.

    `views` collects, by owning layer, what queries may look at, for the layers that borrow it;
    `taps` the arrays that a trace wants.
    """

    starts: Lengths
    num_valid: Lengths
    slots: Slots | None
    options: ComputeOptions
    positions: Int[Array, "B T"]
    rope: dict[bool, tuple[Array, Array]]
    caches: dict
    views: dict[int, KeyView | RotatedView]
    taps: Taps


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

    def __call__(self, x: Hidden, step: StepContext) -> Hidden:
        """Attends from `x` `[B, T, D]`; writes the layer's cache in `step` if it owns one."""
        spec, group = self.spec, self.group
        tables, name = step.rope[spec.is_sliding], f"layers.{spec.index}.attn"
        with jax.named_scope("qkv"):
            fused = linear(x, self.qkv_proj.get_value())
            q = rotate(self.q_norm(fused[..., :group, :]), tables, dtype=jnp.float32)
        if spec.owns_kv:
            with jax.named_scope("cache"):
                raw_k = fused[..., group, :]
                # Where keys equal values, the value is the raw key projection: not normed by
                # k_norm and not rotated.
                raw_v = raw_k if spec.k_eq_v else fused[..., group + 1, :]
                k, v = rotate(self.k_norm(raw_k), tables), rms_norm(raw_v, eps=self.eps)
                step.taps.put(f"{name}.k", k), step.taps.put(f"{name}.v", v)
                step.caches[spec.index], view = step.caches[spec.index].extend(
                    k, v, step.starts, step.num_valid, step.slots, spec.window
                )
                if isinstance(view, RotatedView):
                    view = dataclasses.replace(view, key_weight=self.k_norm.weight.get_value())
                step.views[spec.index] = view
        with jax.named_scope("attend"):
            view = step.views[spec.kv_owner]
            heads = step.taps.put(f"{name}.q", q.reshape(*q.shape[:2], -1, spec.head_dim))
            step.taps.put_attention(name, heads, step.positions, view, spec.window)
            out = attend(heads, step.positions, view, spec.window, step.options)
        with jax.named_scope("o"):
            out = linear(out.reshape(q.shape), self.o_proj.get_value(), num_in=3)
            return step.taps.put(f"{name}.out", out)


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

    def __call__(self, x: Hidden) -> Hidden:
        """Applies the MLP row by row."""
        with jax.named_scope("gate_up"):
            gate_up = linear(x, self.gate_up_proj.get_value())
            gated = gelu_gate(gate_up[..., 0, :], gate_up[..., 1, :])
        with jax.named_scope("down"):
            return linear(gated, self.down_proj.get_value())


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

    def __call__(self, x: Hidden, inputs: Float[Array, "B T P"]) -> Hidden:
        """What to add to the residual `x` for this layer's `inputs`."""
        gated = gelu_gate(linear(x, self.gate.get_value()), inputs)
        return self.norm(linear(gated, self.projection.get_value()))


class DecoderLayer(nnx.Module):
    """One layer: attention and MLP, each between two norms, and the trained residual scale.

    Where the model has experts, they and the MLP run side by side, each with norms of its own.
    """

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike):
        def norm(name: str) -> RMSNorm:
            return RMSNorm(f"layers.{index}.{name}", config.hidden_size, config.rms_norm_eps, dtype)

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
        self.layer_scalar = vector(f"layers.{index}.layer_scalar", 1, dtype)

    def __call__(
        self, x: Hidden, per_layer: Float[Array, "B T P"] | None, step: StepContext
    ) -> Hidden:
        """The layer's output for the residual stream `x`."""
        name = f"layers.{self.self_attn.spec.index}"
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step))
        with jax.named_scope("mlp"):
            out = step.taps.put(f"{name}.mlp.out", self.mlp(self.pre_feedforward_layernorm(x)))
            if self.experts is not None:
                out = self.post_feedforward_layernorm_1(out) + self._mixture(x, step)
            x = x + self.post_feedforward_layernorm(out)
        if self.per_layer_input is not None:
            with jax.named_scope("per_layer_input"):
                x = x + step.taps.put(f"{name}.per_layer.out", self.per_layer_input(x, per_layer))
        return x * self.layer_scalar.get_value()

    def _mixture(self, x: Hidden, step: StepContext) -> Hidden:
        """The experts' part, from the residual `x`: the router sees it un-normed."""
        with jax.named_scope("experts"):
            weights, chosen = self.router(x)
            # Rows that hold no token choose nobody, so that nothing is read for them.
            is_token = jnp.arange(x.shape[1]) < step.num_valid[:, None]
            chosen = jnp.where(is_token[..., None], chosen, self.router.num_experts)
            normed = self.pre_feedforward_layernorm_2(x)
            mixed = self.experts(normed, weights, chosen, step.options.experts)
            return self.post_feedforward_layernorm_2(mixed)


class PerLayerEmbedding(nnx.Module):
    """Per-layer inputs of E2B and E4B: a packed table, and a projection of the embedding."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        self.num_layers, self.width = config.num_hidden_layers, config.hidden_size_per_layer_input
        packed, hidden = self.num_layers * self.width, config.hidden_size
        self.context_scale = hidden**-0.5
        self.embed_tokens_per_layer = param(
            (config.vocab_size_per_layer_input, packed),
            dtype,
            axes=(None, None),
            tensors=(
                TensorSource(
                    "embed_tokens_per_layer.weight", (config.vocab_size_per_layer_input, packed)
                ),
            ),
        )
        self.per_layer_model_projection = matrix(
            "per_layer_model_projection.weight", hidden, packed, ("embed", None), dtype
        )
        self.per_layer_projection_norm = RMSNorm(
            "per_layer_projection_norm", self.width, config.rms_norm_eps, dtype
        )

    def __call__(self, tokens: Tokens, x: Hidden) -> Float[Array, "B T L P"]:
        """Inputs of all layers for `tokens` whose scaled embeddings are `x`."""
        shape = (*tokens.shape, self.num_layers, self.width)
        table = self.embed_tokens_per_layer.get_value()
        token_part = embed(tokens, table, math.sqrt(self.width)).reshape(shape)
        projected = linear(x, self.per_layer_model_projection.get_value())
        projected = scale(projected, self.context_scale)
        context_part = self.per_layer_projection_norm(projected.reshape(shape))
        return scale(context_part + token_part, 2**-0.5)


class Gemma4(nnx.Module):
    """The text model: embedding, layers, final norm, tied head.

    Args:
      config: the model's facts.
      dtype: storage and activation type, bfloat16 or float32.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        self.config = config
        self.embed_tokens = param(
            (config.vocab_size, config.hidden_size),
            dtype,
            axes=(None, "embed"),
            fan_in=config.hidden_size,
            tensors=(TensorSource("embed_tokens.weight", (config.vocab_size, config.hidden_size)),),
        )
        self.per_layer_embedding = (
            PerLayerEmbedding(config, dtype) if config.hidden_size_per_layer_input else None
        )
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype) for i in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps, dtype)

    def __call__(
        self,
        tokens: Tokens,
        bank: CacheBank,
        num_valid: Lengths,
        slots: Slots | None = None,
        options: ComputeOptions = PLAIN,
        taps: Taps = NO_TAPS,
    ) -> tuple[Hidden, CacheBank]:
        """Runs T new positions of some slots through the model.

        Args:
          tokens: ids at positions `lengths + t` of each slot, `[b, T]`.
          bank: all caches.
          num_valid: real rows of each slot, `[b]`; 0 leaves a slot as it is.
          slots: which cache slot each row of `tokens` belongs to, `[b]`, all different; None is all
            slots in order, which spares a copy of the caches.
          options: which implementations compute it.
          taps: collects what a trace wants to see.

        Returns:
          Final-normed hidden states `[b, T, D]` (rows past `num_valid` mean nothing), and the bank
          with the rows added and the lengths moved on.
        """
        config = self.config
        starts = bank.lengths if slots is None else bank.lengths[slots]
        positions = starts[:, None] + jnp.arange(tokens.shape[1])
        step = StepContext(
            starts=starts,
            num_valid=num_valid,
            slots=slots,
            options=options,
            positions=positions,
            rope={
                layer.is_sliding: rope_tables(positions, layer_frequencies(config, layer))
                for layer in config.layers
            },
            caches=dict(bank.layers),
            views={},
            taps=taps,
        )
        with jax.named_scope("embed"):
            x = embed(tokens, self.embed_tokens.get_value(), math.sqrt(config.hidden_size))
            taps.put("embed", x)
            per_layer = self.per_layer_embedding and self.per_layer_embedding(tokens, x)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                inputs = None if per_layer is None else per_layer[:, :, index]
                x = taps.put(f"layers.{index}.residual", layer(x, inputs, step))
        lengths = starts + num_valid if slots is None else bank.lengths.at[slots].add(num_valid)
        hidden = taps.put("hidden", self.norm(x))
        return hidden, dataclasses.replace(bank, layers=step.caches, lengths=lengths)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Soft-capped logits of final-normed hidden states, float32."""
        with jax.named_scope("head"):
            raw = tied_head(hidden, self.embed_tokens.get_value())
            return soft_cap(raw, self.config.final_logit_softcapping)


def layer_frequencies(config: ModelConfig, layer: LayerSpec) -> Float[np.ndarray, "half"]:
    """RoPE frequencies of a layer; see `rope_frequencies`."""
    if layer.is_sliding:
        return rope_frequencies(layer.head_dim, config.sliding_rope_theta)
    return rope_frequencies(
        layer.head_dim, config.full_rope_theta, config.partial_rotary_factor, config.rope_factor
    )
