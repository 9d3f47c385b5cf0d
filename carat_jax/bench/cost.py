"""The least a step has to do: bytes to read and operations, by layer kind and part.

Weights count by their declared leaves, each read once a pass, but of a table that is looked up the
rows that are wanted, and of a mixture the experts that were counted, or as many as chance takes;
keys and values count where a query may see them. What an implementation moves beyond that (a cache
read whole, activations) is its own affair and shows as a share of the limit below one. Kinds and
parts are those of `kernel_trace`.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from carat_jax.assistant_families import last_owners
from carat_jax.decoding.drafters import AssistantDrafter
from carat_jax.engine.api import Engine
from carat_jax.families import LayerSpec
from carat_jax.model.params import merge

_PARTS = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down"}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes read at least, and floating-point operations (a multiply-add is two)."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: float) -> "Cost":
        return Cost(self.bytes * times, self.flops * times)

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The least time on a device that reads and multiplies so fast, both at once."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s)


def total(costs: Mapping[Any, Cost]) -> Cost:
    """The sum."""
    return sum(costs.values(), Cost())


def pass_costs(
    engine: Engine,
    context: int,
    rows: int,
    slots: int = 1,
    logit_rows: int | None = None,
    experts_read: float | None = None,
) -> dict[tuple[str, str], Cost]:
    """The target's pass over `rows` new positions of each of `slots` slots after `context`.

    The logits of `logit_rows` rows a slot count: of all unless given, of 1 in a prefill. Layers
    that own no keys have to run for those rows alone. A mixture reads `experts_read` experts a
    layer; None is as many as tokens take that choose by chance.
    """
    model, costs = engine.model, defaultdict(Cost)
    logit_rows = rows if logit_rows is None else logit_rows
    for path, leaf in jax.tree.leaves_with_path(engine.loop._params["target"]):
        names = _names(path)
        kind, used = ("head", logit_rows) if names[-1] == "embed_tokens" else ("rest", rows)
        if names[0] == "layers":
            layer = model.layer(int(names[1]))
            kind, used = _kind(layer), rows if layer.owns_kv else logit_rows
        if names[-1] == "embed_tokens_per_layer":
            looked_up = min(1.0, rows * slots / model.vocab_size_per_layer_input)
            costs[kind, "rest"] += Cost(leaf.nbytes * looked_up)
        elif "experts" in names:
            costs[kind, "experts"] += _experts(leaf, layer, used * slots, experts_read)
        else:
            costs[kind, _part(names)] += _product(leaf, used * slots)
    for layer in model.layers:
        owner = model.layer(layer.kv_owner)
        heads = model.num_attention_heads
        used = rows if layer.owns_kv else logit_rows
        costs[_kind(layer), "attend"] += _attention(
            engine, owner, heads, layer.window, context + rows - used, used, slots
        )
    return dict(costs)


def draft_costs(engine: Engine, context: int, slots: int = 1) -> dict[tuple[str, str], Cost]:
    """A burst of the engine's assistant: every draft reads its weights and the keys it may see.

    Other drafters cost nothing that is counted here.
    """
    drafter = getattr(engine.loop.drafter, "assistant", engine.loop.drafter)
    if not isinstance(drafter, AssistantDrafter):
        return {}
    params = engine.loop._params["draft"]
    config = merge(drafter.graph, params).config
    owners = {kind: engine.model.layer(i) for kind, i in last_owners(engine.model).items()}
    costs = defaultdict(Cost)
    for path, leaf in jax.tree.leaves_with_path(params):
        names = _names(path)
        if names[-1] == "embed_tokens":
            # An ordered head looks at the best clusters of tokens alone.
            looked_at = 1.0
            if config.use_ordered_embeddings:
                looked_at = config.centroid_intermediate_top_k / config.num_centroids
            bytes_read = leaf.nbytes * min(1.0, looked_at * slots)
            costs["draft", "head"] += Cost(bytes_read, 2.0 * leaf.size * looked_at * slots)
        else:
            costs["draft", _part(names)] += _product(leaf, slots)
    for layer in config.layers:
        owner, heads = owners[layer.is_sliding], config.num_attention_heads
        costs["draft", "attend"] += _attention(
            engine, owner, heads, layer.window, context, 1, slots
        )
    return {key: cost * drafter.num_drafts for key, cost in costs.items()}


def round_costs(
    engine: Engine, context: int, slots: int = 1, experts_read: float | None = None
) -> dict[tuple[str, str], Cost]:
    """A round of the engine: its pass over its rows of every slot, and the drafts before it."""
    rows = engine.loop.num_rows
    passed = pass_costs(engine, context, rows, slots, experts_read=experts_read)
    return passed | draft_costs(engine, context, slots)


def _names(path: tuple) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]


def _kind(layer: LayerSpec) -> str:
    return "local" if layer.is_sliding else "global"


def _part(names: list[str]) -> str:
    return _PARTS.get(names[-1], "norm" if names[-1] == "weight" else "rest")


def _product(leaf: jax.Array, rows: int) -> Cost:
    """A weight read once and applied to `rows` rows; what is no matrix costs no operations."""
    return Cost(leaf.nbytes, 2.0 * leaf.size * rows if leaf.ndim > 1 else 0.0)


def _experts(leaf: jax.Array, layer: LayerSpec, rows: int, read: float | None) -> Cost:
    """The experts that `rows` tokens take, `read` of them or what is to be expected by chance."""
    share = layer.top_k_experts / layer.num_experts
    touched = 1 - (1 - share) ** rows if read is None else read / layer.num_experts
    return Cost(leaf.nbytes * touched, 2.0 * leaf.size * share * rows)


def _attention(
    engine: Engine,
    owner: LayerSpec,
    num_heads: int,
    window: int | None,
    context: int,
    rows: int,
    slots: int,
) -> Cost:
    """Scores and values of all query heads against the keys of `owner` that the rows may see."""
    config, model, end = engine.config, engine.model, context + rows
    held = min(end, window + rows - 1) if window else end
    # A row sees what came before it and itself, at most a window of it.
    seen = sum(min(context + i + 1, window or end) for i in range(rows))
    is_rotated = config.cache.global_layers == "v_rot" and not owner.is_sliding and owner.k_eq_v
    numbers = owner.head_dim + (model.rotated_width(owner) if is_rotated else owner.head_dim)
    bytes_read = owner.num_kv_heads * held * numbers * jnp.dtype(config.dtype).itemsize
    return Cost(slots * bytes_read, slots * 4.0 * num_heads * owner.head_dim * seen)
