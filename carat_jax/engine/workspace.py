"""What compiled steps need beside their inputs and outputs, estimated from above without compiling.

A step's layers run one after the other, so its workspace is that of the neediest layer and what
lives through all of them. Counted is what the equations make, in float32 whatever is stored:

    residual stream     4 copies of [rows, D]: the stream, its norm, a sum, a product
    attention           queries and keys twice (projected, rotated); in plain JAX scores, weights
                        and mask, bounded as `numerics.attention` bounds them, and the keys and
                        values looked at; in the kernels each program's partial results
    MLP                 gate, up and their product, and those of each expert a row passes; with
                        `ragged_dot` its rows for every expert and a copy of the matrices
    logits              twice for scoring (raw, normalised), `_SAMPLER_COPIES` in a round

A chunk reads a ring before it overwrites it, for which XLA copies the rings of all slots on a CPU
(on a GPU it does not; they are room to spare). On a CPU it widens bfloat16 weights and caches to
float32, those of all layers at once. The copies counted are those that `memory_analysis()` of the
compiled steps shows; the tests hold one to the other.
"""

import dataclasses

import jax.numpy as jnp

from carat_jax.config import Config
from carat_jax.engine.shapes import prefill_sizes, score_sizes
from carat_jax.families import LayerSpec, ModelConfig
from carat_jax.numerics.attention import MAX_SCORES
from carat_jax.numerics.options import ComputeOptions
from pallas_kernels.tiles import MAX_ROWS

# Sorted logits and their order, probabilities, sums, noise: the compiler's own figure is 10.3.
_SAMPLER_COPIES = 12
# Programs of a split-KV kernel over one slot: one for each multiprocessor of the largest device.
_PROGRAMS = 132
# What the libraries of matrix products take on a GPU.
_LIBRARIES = 2**26


@dataclasses.dataclass(frozen=True)
class Passes:
    """The passes an engine's steps make.

    Attributes:
      config: all settings.
      models: facts of the target, and of a drafter that is a model.
      max_context: positions of a slot.
      num_rows: rows a slot of a round.
      options: which implementations compute it.
      backend: "gpu" or "cpu".
    """

    config: Config
    models: tuple[ModelConfig, ...]
    max_context: int
    num_rows: int
    options: ComputeOptions
    backend: str

    def workspace(self, *, rings: int, weights: int, caches: int) -> int:
        """Bytes of the neediest step, given the bytes of rings, all weights and all caches."""
        engine, logits = self.config.engine, 4 * self.models[0].vocab_size
        chunk, scored = prefill_sizes(self.config)[-1], score_sizes(self.config)[-1]
        # Nothing keeps the passes of a target and its drafter apart.
        prefill = rings + sum(self._forward(facts, 1, chunk, True) for facts in self.models)
        rounds = sum(
            self._forward(facts, engine.max_batch, self.num_rows, False) for facts in self.models
        )
        drawing = _SAMPLER_COPIES * logits * engine.max_batch * self.num_rows
        need = max(prefill + 2 * logits * scored, rounds + drawing)
        if self.backend != "cpu":
            return need + _LIBRARIES
        return need + (2 * (weights + caches) if self.config.dtype == "bfloat16" else 0)

    def _forward(self, facts: ModelConfig, num_slots: int, num_new: int, is_chunk: bool) -> int:
        """What `num_new` rows of each slot make on their way to the final norm."""
        rows = num_slots * num_new
        stream = 4 * 4 * rows * facts.hidden_size
        per_layer = 3 * 4 * rows * facts.num_hidden_layers * facts.hidden_size_per_layer_input
        kinds = {dataclasses.replace(layer, index=0, kv_owner=0) for layer in facts.layers}
        attention = max(
            self._attention(facts, layer, num_slots, num_new, is_chunk) for layer in kinds
        )
        mlp = max(self._mlp(facts, layer, rows) for layer in kinds)
        return stream + per_layer + self._transposed(facts) + max(attention, mlp)

    def _attention(
        self, facts: ModelConfig, layer: LayerSpec, num_slots: int, num_new: int, is_chunk: bool
    ) -> int:
        kind, heads = self.config.cache.local_layers, facts.num_attention_heads
        num_kv, dim, rows = layer.num_kv_heads, layer.head_dim, num_slots * num_new
        projected = 2 * 4 * rows * (heads + 2 * num_kv) * dim
        keys = self.max_context
        if layer.is_sliding and kind != "full":
            keys = facts.sliding_window + 64 + num_new
        view = 2 * num_slots * num_kv * keys * dim * jnp.dtype(self.config.dtype).itemsize
        group = num_new * heads // num_kv
        is_staged = not self.options.is_fused and not layer.is_sliding and group <= MAX_ROWS
        is_paged = layer.is_sliding and kind == "paged"
        if self.options.impl == "xla" or is_staged or is_paged:
            scores = min(rows * heads * keys, max(MAX_SCORES, num_slots * heads * keys))
            return projected + (3 if is_chunk or is_paged else 1) * view + (4 + 4 + 1) * scores
        # A chunk's slot is taken out of the cache; rounds read the caches where they are.
        programs = 1
        if group <= MAX_ROWS:
            programs = max(_PROGRAMS, num_kv * min(64, -(-keys // 64)))
        partial = 4 * num_slots * programs * max(16, group) * dim
        return projected + (view if is_chunk else 0) + partial

    def _mlp(self, facts: ModelConfig, layer: LayerSpec, rows: int) -> int:
        """Bytes of the MLP and of the experts beside it."""
        dense = 4 * rows * 3 * layer.mlp_width
        if not layer.num_experts:
            return dense
        experts, hidden, impl = layer.num_experts, facts.hidden_size, self.options.experts
        used = experts if impl == "dense" else layer.top_k_experts
        made = 4 * rows * used * (3 * layer.expert_width + hidden)
        if impl != "ragged_dot":
            return dense + made
        # Without a grouped product every (token, expert) pair is laid out for every expert.
        itemsize = 4 if self.backend == "cpu" else jnp.dtype(self.config.dtype).itemsize
        return dense + made + itemsize * rows * used * experts * hidden

    def _transposed(self, facts: ModelConfig) -> int:
        """Bytes of the experts' matrices that `ragged_dot` transposes: a layer's, on a CPU all.

        There those of bfloat16 are counted where they are widened.
        """
        itemsize = jnp.dtype(self.config.dtype).itemsize
        if self.options.experts != "ragged_dot" or (self.backend == "cpu" and itemsize == 2):
            return 0
        matrices = [
            layer.num_experts * layer.expert_width * facts.hidden_size * itemsize
            for layer in facts.layers
        ]
        return 3 * sum(matrices) if self.backend == "cpu" else 2 * max(matrices)
