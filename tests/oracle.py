"""An independent Gemma 4 text forward: numpy, float64, no cache, the whole sequence every time.

It reads a text config as published and tensors under their checkpoint names, so it shares neither
code nor data structures with the engine it judges; `test_oracle` holds it against transformers.
Each rule that implementations get wrong is one short method: a subclass that breaks one method is
the negative control of the test that guards the rule.
Imports nothing of carat_jax.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

Array = np.ndarray


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def softmax(scores: Array) -> Array:
    """Softmax over the last axis; a row of all -inf is a fault and gives NaN."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def log_softmax(logits: Array) -> Array:
    """Log-probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def top2_gap(logits: Array) -> Array:
    """Distance between the best and the second-best logit of each row."""
    best = np.sort(logits, axis=-1)[..., -2:]
    return best[..., 1] - best[..., 0]


class Reference:
    """One model: `config` is a published text config (flat), `weights` maps names to arrays.

    `embed_scale` is sqrt(hidden_size) unless given (a model rounds it to the weights' dtype).
    `trace`, after a forward, holds intermediate values: "embed", "ple", "layers.3.k", "hidden", ...
    """

    def __init__(
        self,
        config: Mapping,
        weights: Mapping[str, Array],
        *,
        embed_scale: float | None = None,
    ):
        self.config = dict(config)
        self.weights = {name: np.asarray(tensor, np.float64) for name, tensor in weights.items()}
        self.eps = config["rms_norm_eps"]
        self.embed_scale = embed_scale or math.sqrt(config["hidden_size"])
        self.trace: dict[str, Array] = {}

    # The rules, one method each.

    def rms_norm(self, x: Array, weight: Array | None = None) -> Array:
        """Root-mean-square norm; the weight multiplies as it is (no +1)."""
        normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.eps)
        return normed if weight is None else normed * weight

    def visible(self, length: int, is_sliding: bool) -> Array:
        """Mask [query, key]: causal, and in sliding layers exactly the last W keys with itself."""
        distance = np.arange(length)[:, None] - np.arange(length)[None, :]
        mask = distance >= 0
        return mask & (distance < self.config["sliding_window"]) if is_sliding else mask

    def inv_freq(self, head_dim: int, is_sliding: bool) -> Array:
        """Frequencies of the head_dim / 2 pairs.

        Proportional: a zero angle past the rotated share, and the exponent's denominator is the
        whole head, not the rotated share.
        """
        rope = self.config["rope_parameters"][
            "sliding_attention" if is_sliding else "full_attention"
        ]
        freq = rope["rope_theta"] ** (-2.0 * np.arange(head_dim // 2) / head_dim)
        if rope["rope_type"] == "proportional":
            live = int(rope["partial_rotary_factor"] * head_dim // 2)
            freq[live:] = 0.0
        return freq / rope.get("factor", 1.0)

    def rotate(self, x: Array, is_sliding: bool) -> Array:
        """Rotate the pairs (i, i + head_dim / 2) of x [T, heads, head_dim] by position."""
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None, None] * self.inv_freq(x.shape[-1], is_sliding)
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def values(self, raw_key: Array, raw_value: Array | None, key: Array) -> Array:
        """The value heads; a layer without v_proj takes its raw key projection, not its `key`."""
        del key
        return self.rms_norm(raw_key if raw_value is None else raw_value)

    def softcap(self, logits: Array) -> Array:
        """cap * tanh(logits / cap), or nothing when the config has no cap."""
        cap = self.config.get("final_logit_softcapping")
        return logits if cap is None else cap * np.tanh(logits / cap)

    # The shape of the model.

    @property
    def num_own_layers(self) -> int:
        """Layers before this index own their keys and values; later ones borrow."""
        return self.config["num_hidden_layers"] - self.config["num_kv_shared_layers"]

    def is_sliding(self, layer: int) -> bool:
        """Whether the layer attends to a window only."""
        return self.config["layer_types"][layer] == "sliding_attention"

    def kv_owner(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads: itself, or the last owner of its kind."""
        if layer < self.num_own_layers:
            return layer
        kind = self.is_sliding(layer)
        return max(i for i in range(self.num_own_layers) if self.is_sliding(i) == kind)

    def head_dim(self, layer: int) -> int:
        """Head width of the layer, for queries and keys alike."""
        return self.config["head_dim" if self.is_sliding(layer) else "global_head_dim"]

    # The forward pass.

    def tensor(self, layer: int, name: str) -> Array:
        """A layer's tensor by its name inside the layer."""
        return self.weights[f"layers.{layer}.{name}"]

    def linear(self, x: Array, layer: int, name: str) -> Array:
        """Product with a checkpoint matrix, which is stored [out, in]."""
        return x @ self.tensor(layer, f"{name}.weight").T

    def heads(self, x: Array, layer: int, name: str) -> Array:
        """A projection cut into heads [T, heads, head_dim]."""
        return self.linear(x, layer, name).reshape(len(x), -1, self.head_dim(layer))

    def keys_values(self, x: Array, layer: int) -> tuple[Array, Array]:
        """Keys (normed, rotated) and values (normed) of an owning layer, [T, heads, head_dim]."""
        raw_key = self.heads(x, layer, "self_attn.k_proj")
        has_value = f"layers.{layer}.self_attn.v_proj.weight" in self.weights
        raw_value = self.heads(x, layer, "self_attn.v_proj") if has_value else None
        key = self.rms_norm(raw_key, self.tensor(layer, "self_attn.k_norm.weight"))
        key = self.rotate(key, self.is_sliding(layer))
        return key, self.values(raw_key, raw_value, key)

    def attention(self, x: Array, layer: int) -> Array:
        """Grouped-query attention with score scale 1, softmax over the visible keys."""
        if layer < self.num_own_layers:
            key, value = self.keys_values(x, layer)
            self.trace[f"layers.{layer}.k"], self.trace[f"layers.{layer}.v"] = key, value
        else:
            owner = self.kv_owner(layer)
            key, value = self.trace[f"layers.{owner}.k"], self.trace[f"layers.{owner}.v"]
        query = self.rms_norm(
            self.heads(x, layer, "self_attn.q_proj"), self.tensor(layer, "self_attn.q_norm.weight")
        )
        query = self.rotate(query, self.is_sliding(layer))
        self.trace[f"layers.{layer}.q"] = query

        group = query.shape[1] // key.shape[1]  # query head h reads key head h // group
        key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
        scores = np.einsum("inh,jnh->nij", query, key)
        scores = np.where(self.visible(len(x), self.is_sliding(layer)), scores, -np.inf)
        mixed = np.einsum("nij,jnh->inh", softmax(scores), value)
        return self.linear(mixed.reshape(len(x), -1), layer, "self_attn.o_proj")

    def mlp(self, x: Array, layer: int) -> Array:
        """down(gelu(gate x) * up x)."""
        gated = gelu_tanh(self.linear(x, layer, "mlp.gate_proj"))
        return self.linear(gated * self.linear(x, layer, "mlp.up_proj"), layer, "mlp.down_proj")

    def router_input(self, residual: Array, layer: int) -> Array:
        """What the router's matrix sees: the residual itself, normed without a weight."""
        scaled = self.rms_norm(residual) * self.tensor(layer, "router.scale")
        return scaled / math.sqrt(self.config["hidden_size"])

    def chosen(self, probs: Array) -> Array:
        """Each token's share of each expert [T, E]: the k best, renormalised, the rest zero."""
        order = np.argsort(-probs, axis=-1, kind="stable")[:, : self.config["top_k_experts"]]
        shares = np.zeros_like(probs)
        np.put_along_axis(shares, order, np.take_along_axis(probs, order, -1), -1)
        return shares / shares.sum(axis=-1, keepdims=True)

    def mixture(self, residual: Array, layer: int) -> Array:
        """The experts' weighted sum, before its norm; they see the residual by a norm of their own.

        Leaves the router's probabilities and the weights of the experts [T, E] in the trace.
        """
        probs = softmax(self.linear(self.router_input(residual, layer), layer, "router.proj"))
        shares = self.chosen(probs) * self.tensor(layer, "router.per_expert_scale")
        self.trace[f"layers.{layer}.router"] = probs
        self.trace[f"layers.{layer}.shares"] = shares
        x = self.rms_norm(residual, self.tensor(layer, "pre_feedforward_layernorm_2.weight"))
        width, total = self.config["moe_intermediate_size"], np.zeros_like(residual)
        for expert in range(self.config["num_experts"]):
            gate_up = x @ self.tensor(layer, "experts.gate_up_proj")[expert].T
            gated = gelu_tanh(gate_up[:, :width]) * gate_up[:, width:]
            made = gated @ self.tensor(layer, "experts.down_proj")[expert].T
            total += shares[:, expert, None] * made
        self.trace[f"layers.{layer}.mixture"] = total
        return total

    def router_gap(self) -> float:
        """After a forward: how near any token's choice of experts came to another one."""
        k, gaps = self.config["top_k_experts"], [np.inf]
        for name, probs in self.trace.items():
            if name.endswith(".router"):
                ranked = np.sort(probs, axis=-1)[:, ::-1]
                gaps.append((ranked[:, k - 1] - ranked[:, k]).min())
        return float(min(gaps))

    def per_layer_inputs(self, ids: Array, embedded: Array) -> Array | None:
        """Per-layer embeddings [T, L, width]: the token's rows plus its projected embedding."""
        width = self.config.get("hidden_size_per_layer_input")
        if not width:
            return None
        shape = (len(ids), self.config["num_hidden_layers"], width)
        token = self.weights["embed_tokens_per_layer.weight"][ids].reshape(shape) * math.sqrt(width)
        context = embedded @ self.weights["per_layer_model_projection.weight"].T
        context = (context / math.sqrt(self.config["hidden_size"])).reshape(shape)
        context = self.rms_norm(context, self.weights["per_layer_projection_norm.weight"])
        return (context + token) / math.sqrt(2.0)

    def layer(self, x: Array, layer: int, per_layer: Array | None) -> Array:
        """One decoder layer; `layer_scalar` multiplies the whole residual stream at its end."""

        def norm(y, name):
            return self.rms_norm(y, self.tensor(layer, f"{name}.weight"))

        attended = self.attention(norm(x, "input_layernorm"), layer)
        x = x + norm(attended, "post_attention_layernorm")
        fed = self.mlp(norm(x, "pre_feedforward_layernorm"), layer)
        if self.config["enable_moe_block"]:
            fed = norm(fed, "post_feedforward_layernorm_1")
            fed = fed + norm(self.mixture(x, layer), "post_feedforward_layernorm_2")
        x = x + norm(fed, "post_feedforward_layernorm")
        if per_layer is not None:
            gated = gelu_tanh(self.linear(x, layer, "per_layer_input_gate")) * per_layer
            x = x + norm(
                self.linear(gated, layer, "per_layer_projection"), "post_per_layer_input_norm"
            )
        return x * self.tensor(layer, "layer_scalar")

    def hidden(self, ids: Sequence[int]) -> Array:
        """Hidden states after the final norm, [T, D]."""
        ids = np.asarray(ids)
        x = self.weights["embed_tokens.weight"][ids] * self.embed_scale
        ple = self.per_layer_inputs(ids, x)
        self.trace = {"embed": x} if ple is None else {"embed": x, "ple": ple}
        for layer in range(self.config["num_hidden_layers"]):
            x = self.layer(x, layer, None if ple is None else ple[:, layer])
            self.trace[f"layers.{layer}"] = x
        self.trace["hidden"] = self.rms_norm(x, self.weights["norm.weight"])
        return self.trace["hidden"]

    def logits(self, ids: Sequence[int]) -> Array:
        """Logits of every position, [T, V]; the head is the unscaled embedding unless stored."""
        head = self.weights.get("lm_head.weight", self.weights["embed_tokens.weight"])
        return self.softcap(self.hidden(ids) @ head.T)

    def greedy(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
        """The greedy continuation, and the smallest top-2 gap on its way."""
        ids, smallest = list(ids), math.inf
        for _ in range(num_tokens):
            last = self.logits(ids)[-1]
            smallest = min(smallest, float(top2_gap(last)))
            ids.append(int(last.argmax()))
        return ids[len(ids) - num_tokens :], smallest
