"""The Gemma 4 text model: embedding, decoder layers, final norm, tied head.

Modules are built without arrays: `nnx.split(Gemma4(config, dtype))` gives a graph and a tree of
shapes, and a step merges the graph with real arrays inside `jit`. Formulas: transformers 5.17,
`modeling_gemma4`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from carat_jax.array_types import Array, Float, Hidden, Lengths, Slots, Tokens
from carat_jax.cache.bank import CacheBank
from carat_jax.families import ModelConfig
from carat_jax.model.decoder_layer import DecoderLayer, run_layers
from carat_jax.model.norm import RMSNorm
from carat_jax.model.params import TensorSource, matrix, param
from carat_jax.model.self_attention import layer_frequencies
from carat_jax.model.step_context import StepContext
from carat_jax.model.taps import NO_TAPS, Taps
from carat_jax.numerics.layers import embed, linear, rope_tables, scale, soft_cap, tied_head
from carat_jax.numerics.options import PLAIN, ComputeOptions


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
        only_last: bool = False,
    ) -> tuple[Float[Array, "B rows D"], CacheBank]:
        """Runs T new positions of some slots through the model.

        Args:
          tokens: ids at positions `lengths + t` of each slot, `[b, T]`.
          bank: all caches.
          num_valid: real rows of each slot, `[b]`; 0 leaves a slot as it is.
          slots: which cache slot each row of `tokens` belongs to, `[b]`, all different; None is all
            slots in order, which spares a copy of the caches.
          options: how attention is computed.
          taps: collects what a trace wants to see.
          only_last: return the last real row of each slot alone. The layers that own no keys, the
            last 20 of E2B's 35 and 18 of E4B's 42, then run for that row alone: what they make of
            the others nobody reads.

        Returns:
          Final-normed hidden states `[b, T, D]`, or `[b, 1, D]` (rows past `num_valid` mean
          nothing), and the bank with the rows added and the lengths moved on.
        """
        config = self.config
        held = bank.lengths if slots is None else bank.lengths[slots]
        # A slot without rows looks at nothing, however much it keeps for whoever continues from it.
        starts = jnp.where(num_valid > 0, held, 0)
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
            per_layer = self.per_layer_embedding and self.per_layer_embedding(tokens, x)
            taps.put("embed", x)
        first_borrower = config.num_hidden_layers - config.num_kv_shared_layers
        from_layer = first_borrower if only_last else None
        hidden = run_layers(self.layers, x, per_layer, step, self.norm, "layer", from_layer)
        taps.put("hidden", hidden)
        lengths = held + num_valid if slots is None else bank.lengths.at[slots].add(num_valid)
        return hidden, dataclasses.replace(bank, layers=step.caches, lengths=lengths)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Soft-capped logits of final-normed hidden states, float32."""
        with jax.named_scope("head"):
            raw = tied_head(hidden, self.embed_tokens.get_value())
            return soft_cap(raw, self.config.final_logit_softcapping)
