"""The MTP assistant: a few layers that read the target's caches and draft its next tokens.

    x = pre_projection([target's scaled embedding of the token, target's final-normed state])
    x = decoder layers with queries only, over the target's last local and last global cache
    y = norm(x);  token = argmax(head(y));  next state = post_projection(y)

A burst of M drafts starts from a sequence whose last token, the bonus, is not in the caches yet:
`hidden` is the state that produced it, and its own index is the one position of the whole burst.
The caches stay as they are: every draft sees the verified keys and none of the burst's, local
layers the last W + 1 of them. A wrong draft costs time and never changes what is generated.

Formulas: transformers 5.17, `modeling_gemma4_assistant`; its head is not soft-capped.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from carat_jax.array_types import Array, Float, Int, Lengths
from carat_jax.assistant_families import (
    GLOBAL_KEYS,
    LOCAL_KEYS,
    MODEL_TYPES,
    AssistantConfig,
    assistant_from_hf,
    last_owners,
)
from carat_jax.cache.bank import CacheBank
from carat_jax.families import ModelConfig
from carat_jax.model.checkpoint import load_params
from carat_jax.model.decoder_layer import DecoderLayer, run_layers
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.json_file import read_json
from carat_jax.model.norm import RMSNorm
from carat_jax.model.params import TensorSource, matrix, param, split
from carat_jax.model.self_attention import layer_frequencies
from carat_jax.model.step_context import StepContext
from carat_jax.model.taps import NO_TAPS
from carat_jax.numerics.attention import KeyView, RotatedView
from carat_jax.numerics.layers import embed, linear, precision, rope_tables, tied_head
from carat_jax.numerics.options import PLAIN, ComputeOptions

# Folder of an assistant inside that of its target.
ASSISTANT = "assistant"
# Chooses draft i of a burst from its logits: tokens, and the log-law they were drawn from.
Choice = Callable[[Float[Array, "B V"], int], tuple[Int[Array, "B"], Float[Array, "B V"]]]
# What an assistant reads, by `LayerSpec.kv_owner` of its layers.
Views = dict[int, KeyView | RotatedView]


class CentroidHead(nnx.Module):
    """Clusters of tokens, scored by their centroids: only the best clusters' tokens are looked at.

    The clusters are consecutive runs of `token_ordering`, which holds every token id once.
    """

    def __init__(self, config: AssistantConfig, dtype: jnp.dtype):
        self.num_clusters = config.centroid_intermediate_top_k
        shape = (config.num_centroids, config.hidden_size)
        self.centroids = param(
            shape,
            dtype,
            axes=(None, "embed"),
            fan_in=config.hidden_size,
            tensors=(TensorSource("/masked_embedding.centroids.weight", shape),),
        )
        self.token_ordering = param(
            (config.vocab_size,),
            jnp.int32,
            axes=(None,),
            fan_in=0,
            tensors=(TensorSource("/masked_embedding.token_ordering", (config.vocab_size,)),),
        )

    def __call__(self, y: Float[Array, "B d"]) -> Int[Array, "B n"]:
        """The ids of the tokens worth scoring."""
        centroids = self.centroids.get_value()
        _, best = jax.lax.top_k(tied_head(y, centroids), self.num_clusters)
        clusters = self.token_ordering.get_value().reshape(len(centroids), -1)
        return clusters[best].reshape(len(y), -1)


class Assistant(nnx.Module):
    """Projection, layers, head.

    Args:
      config: the assistant's facts.
      target: those of the model it drafts for; None where none is there to be drafted for.
      dtype: storage and activation type, the target's.

    Raises:
      ValueError: the assistant does not fit the target.
    """

    def __init__(self, config: AssistantConfig, target: ModelConfig | None, dtype: jnp.dtype):
        if target is not None:
            config.check_fits(target)
        self.config = config
        width, backbone = config.hidden_size, config.backbone_hidden_size
        # The table is the output head; tokens come in through the target's.
        self.embed_tokens = param(
            (config.vocab_size, width),
            dtype,
            axes=(None, "embed"),
            fan_in=width,
            tensors=(TensorSource("embed_tokens.weight", (config.vocab_size, width)),),
        )
        self.pre_projection = matrix(
            "/pre_projection.weight", 2 * backbone, width, (None, "embed"), dtype
        )
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype) for i in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm("norm", width, config.rms_norm_eps, dtype)
        self.post_projection = matrix(
            "/post_projection.weight", width, backbone, ("embed", None), dtype
        )
        self.masked_embedding = (
            CentroidHead(config, dtype) if config.use_ordered_embeddings else None
        )

    def __call__(
        self,
        embedding: Float[Array, "B D"],
        hidden: Float[Array, "B D"],
        positions: Int[Array, "B"],
        views: Views,
        options: ComputeOptions = PLAIN,
    ) -> tuple[Float[Array, "B d"], Float[Array, "B D"]]:
        """One draft step.

        Args:
          embedding: the target's scaled embedding of the last token.
          hidden: the final-normed state that produced it, or what the step before returned.
          positions: index of the burst's bonus token, which is the number of verified keys.
          views: from `target_views`.
          options: which implementations compute it.

        Returns:
          The state for the head, and the `hidden` of the next step.
        """
        step = StepContext(
            starts=positions,
            num_valid=jnp.zeros_like(positions),
            slots=None,
            options=options,
            # Who sees whom is counted from the last verified key, angles from the bonus token.
            positions=positions[:, None] - 1,
            rope={
                layer.is_sliding: rope_tables(
                    positions[:, None], layer_frequencies(self.config, layer)
                )
                for layer in self.config.layers
            },
            caches={},
            views=views,
            taps=NO_TAPS,
        )
        x = linear(jnp.concatenate([embedding, hidden], axis=-1), self.pre_projection.get_value())
        y = run_layers(self.layers, x[:, None], None, step, self.norm, "assistant")[:, 0]
        # The barrier keeps XLA from computing this product inside the next step's concatenation,
        # where a product of 11 MB took 54 us on an H200.
        return y, lax.optimization_barrier(linear(y, self.post_projection.get_value()))

    def candidates(
        self, y: Float[Array, "B d"]
    ) -> tuple[Float[Array, "B n"], Int[Array, "B n"] | None]:
        """Scores of the tokens the head looks at, float32, and their ids (None: all, in order)."""
        table = self.embed_tokens.get_value()
        if self.masked_embedding is None:
            with jax.named_scope("head"):
                return tied_head(y, table), None
        ids = self.masked_embedding(y)
        scores = jnp.einsum(
            "bd,bnd->bn",
            y,
            table[ids],
            precision=precision(y.dtype),
            preferred_element_type=jnp.float32,
        )
        return scores, ids

    def logits(self, y: Float[Array, "B d"]) -> Float[Array, "B V"]:
        """Scores of the whole vocabulary; -inf where the head does not look."""
        scores, ids = self.candidates(y)
        if ids is None:
            return scores
        nothing = jnp.full((len(y), self.config.vocab_size), -jnp.inf, jnp.float32)
        return nothing.at[jnp.arange(len(y))[:, None], ids].set(scores)

    def draft_token(
        self, y: Float[Array, "B d"], bias: Float[Array, "B V"] | None = None
    ) -> Int[Array, "B"]:
        """The best token of each row. A `bias` of -inf keeps a token from being drafted."""
        scores, ids = self.candidates(y)
        if bias is not None:
            scores += bias if ids is None else jnp.take_along_axis(bias, ids, axis=-1)
        best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        return best if ids is None else jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "logits"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Burst:
    """What M draft steps give.

    Attributes:
      tokens: the drafts.
      logits: what each was chosen from: before any bias, or the law `choose` drew from. A compiled
        step that drops them does not compute more than the choice needs.
    """

    tokens: Int[Array, "B M"]
    logits: Float[Array, "B M V"]


def target_views(target: Gemma4, bank: CacheBank) -> Views:
    """What an assistant sees of the target's caches: the positions each slot holds, and no more.

    After a verify step of M + 1 rows of which at least one is kept, a ring of C >= W + M + 1 still
    holds all W + 1 keys. A slot rolled back by all of C - W rows would lack the oldest of them.
    """
    views = {}
    for is_sliding, index in last_owners(target.config).items():
        view = bank.layers[index].view(bank.lengths, None)
        if isinstance(view, RotatedView):
            weight = target.layers[index].self_attn.k_norm.weight.get_value()
            view = dataclasses.replace(view, key_weight=weight)
        views[LOCAL_KEYS if is_sliding else GLOBAL_KEYS] = view
    return views


def draft(
    assistant: Assistant,
    target: Gemma4,
    views: Views,
    tokens: Int[Array, "B"],
    hidden: Float[Array, "B D"],
    positions: Lengths,
    num_drafts: int,
    bias: Float[Array, "B V"] | None = None,
    options: ComputeOptions = PLAIN,
    choose: Choice | None = None,
) -> Burst:
    """Drafts `num_drafts` tokens, the best ones unless `choose` says otherwise.

    Args:
      assistant: the assistant.
      target: the model it drafts for; its embedding is read.
      views: from `target_views`.
      tokens: each slot's last token, which is not in the caches.
      hidden: the target's final-normed state that produced it.
      positions: index of that token, the number of positions in the caches.
      num_drafts: M.
      bias: added to the scores before the choice of the best one; -inf keeps a token from being
        drafted.
      options: which implementations compute it.
      choose: from the logits `[B, V]` of draft i, its tokens and the log-law they were drawn from.
    """
    table, scale = target.embed_tokens.get_value(), math.sqrt(target.config.hidden_size)
    drafted, logits = [], []
    # Unrolled: the compiler then prepares the frozen keys once for all steps.
    for i in range(num_drafts):
        embedding = embed(tokens[:, None], table, scale)[:, 0]
        y, hidden = assistant(embedding, hidden, positions, views, options)
        law = assistant.logits(y)
        if choose is None:
            tokens = assistant.draft_token(y, bias)
        else:
            tokens, law = choose(law, i)
        drafted.append(tokens)
        logits.append(law)
    return Burst(jnp.stack(drafted, axis=1), jnp.stack(logits, axis=1))


def is_assistant(folder: Path) -> bool:
    """Whether the config.json of a folder says that it holds an assistant."""
    path = Path(folder) / "config.json"
    return path.is_file() and read_json(path).get("model_type") in MODEL_TYPES


def read_assistant_config(folder: Path) -> AssistantConfig:
    """The facts of the assistant in `folder`.

    Raises:
      ValueError: there is no config.json, or it describes no assistant that can be run.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; is this the folder of an assistant?")
    raw = read_json(path)
    if raw.get("quantization_config"):
        raise ValueError(f"{folder}: quantised assistants are not supported")
    try:
        return assistant_from_hf(raw)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: a value has the wrong type: {error}") from error


def declare_assistant(
    folder: Path, target: ModelConfig, dtype: jnp.dtype
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The assistant in `folder`, checked against its target: graph and specs; no weights are read.

    Raises:
      ValueError: it does not fit the target, or cannot be run.
    """
    config = read_assistant_config(folder)
    try:
        return split(Assistant(config, target, dtype))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def load_assistant(
    folder: Path, target: ModelConfig, dtype: jnp.dtype
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The assistant in `folder`, published or converted, checked against its target.

    Returns:
      Its graph and parameters.

    Raises:
      ValueError: it does not fit the target, or its files are not exactly an assistant's.
    """
    graph, specs = declare_assistant(folder, target, dtype)
    config = read_assistant_config(folder)
    params = load_params(folder, specs, is_tied=True)
    if config.use_ordered_embeddings:
        ordering = np.asarray(params["masked_embedding"]["token_ordering"])
        held = np.unique(ordering[(ordering >= 0) & (ordering < config.vocab_size)]).size
        if held != config.vocab_size:
            raise ValueError(
                f"{folder}: masked_embedding.token_ordering holds {held} of the "
                f"{config.vocab_size} token ids, not each of them once"
            )
    return graph, params
