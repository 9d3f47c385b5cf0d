"""An independent MTP assistant: numpy, float64, over the keys and values of a `Reference` target.

It reads an assistant's config.json and tensors under their published names and shares neither code
nor data structures with the engine. As in `oracle`, each rule that implementations get wrong is
one short method, so that a subclass that breaks it is the negative control of its test.
Imports nothing of carat_jax.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tests.oracle import Array, Reference, softmax


@dataclasses.dataclass(frozen=True)
class DraftStep:
    """One step of a burst: what it drew from, what it drew, and the state it passes on."""

    logits: Array
    token: int
    state: Array


class ReferenceAssistant(Reference):
    """One assistant. Unscored tokens of a centroid head have a logit of -inf."""

    def __init__(self, config: Mapping, weights: Mapping[str, Array], target: Reference):
        super().__init__(config["text_config"], {})
        self.facts, self.target = dict(config), target
        for name, tensor in weights.items():
            self.weights[name.removeprefix("model.")] = np.asarray(tensor, np.float64)

    # The rules, one method each.

    def position(self, num_keys: int, step: int) -> int:
        """The position of every step's query: the bonus token's own index, which has no key yet."""
        del step
        return num_keys

    def num_visible(self, num_keys: int, is_sliding: bool) -> int:
        """How many of the latest keys are seen: all, on local layers W + 1."""
        return min(num_keys, self.config["sliding_window"] + 1) if is_sliding else num_keys

    def owner(self, is_sliding: bool) -> int:
        """The target's layer whose keys are read: the last of its kind that owns any."""
        owners = range(self.target.num_own_layers)
        return max(i for i in owners if self.target.is_sliding(i) == is_sliding)

    def embedding(self, token: int) -> Array:
        """The target's embedding, scaled."""
        return self.target.weights["embed_tokens.weight"][token] * self.target.embed_scale

    def join(self, embedding: Array, state: Array) -> Array:
        """What enters: first the embedding, then the state; nothing is scaled again."""
        return np.concatenate([embedding, state]) @ self.weights["pre_projection.weight"].T

    def fed_back(self, before_norm: Array, normed: Array) -> Array:
        """The state of the next step comes from behind the final norm."""
        del before_norm
        return normed @ self.weights["post_projection.weight"].T

    def scores(self, normed: Array) -> Array:
        """Logits of the vocabulary from the assistant's own table, without a soft cap."""
        table = self.weights["embed_tokens.weight"]
        if not self.facts["use_ordered_embeddings"]:
            return table @ normed
        best = np.argsort(-(self.weights["masked_embedding.centroids.weight"] @ normed))
        best = best[: self.facts["centroid_intermediate_top_k"]]
        ordering = self.weights["masked_embedding.token_ordering"].astype(int)
        ids = ordering.reshape(self.facts["num_centroids"], -1)[best].ravel()
        logits = np.full(len(table), -np.inf)
        logits[ids] = table[ids] @ normed
        return logits

    # The burst.

    def turned(self, x: Array, is_sliding: bool, position: int) -> Array:
        """Heads [N, H] rotated to one position."""
        half = x.shape[-1] // 2
        angle = position * self.inv_freq(x.shape[-1], is_sliding)
        first, second = x[:, :half], x[:, half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def attention(self, x: Array, layer: int) -> Array:
        """One query against the target's latest keys."""
        is_sliding, num_keys, position = self.is_sliding(layer), self.num_keys, self.now
        seen = slice(num_keys - self.num_visible(num_keys, is_sliding), num_keys)
        owner = self.owner(is_sliding)
        key = self.target.trace[f"layers.{owner}.k"][seen]
        value = self.target.trace[f"layers.{owner}.v"][seen]
        query = self.heads(x, layer, "self_attn.q_proj")[0]
        query = self.rms_norm(query, self.tensor(layer, "self_attn.q_norm.weight"))
        query = self.turned(query, is_sliding, position)
        group = len(query) // key.shape[1]
        key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
        mixed = np.einsum("nj,jnh->nh", softmax(np.einsum("nh,jnh->nj", query, key)), value)
        return self.linear(mixed.reshape(1, -1), layer, "self_attn.o_proj")

    def burst(
        self, ids: Sequence[int], num_steps: int, bias: Array | None = None
    ) -> list[DraftStep]:
        """Drafts after `ids`, of which the last, the bonus, is not in the target's caches."""
        state = self.target.hidden(ids[:-1])[-1]
        self.num_keys, token, steps = len(ids) - 1, ids[-1], []
        for step in range(num_steps):
            self.now = self.position(self.num_keys, step)
            x = self.join(self.embedding(token), state)[None]
            for layer in range(self.config["num_hidden_layers"]):
                x = self.layer(x, layer, None)
            normed = self.rms_norm(x, self.weights["norm.weight"])
            logits, state = self.scores(normed[0]), self.fed_back(x[0], normed[0])
            token = int(np.argmax(logits if bias is None else logits + bias))
            steps.append(DraftStep(logits, token, state))
        return steps
