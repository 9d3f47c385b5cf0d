"""Named arrays inside the model, for research: what `Engine.trace` captures.

The model offers each array to the `Taps` of its step, which keep the wanted ones while a step is
traced. A step without taps wants nothing, so that nothing of this is in its executable.
"""

import dataclasses

import jax
import jax.numpy as jnp

from carat_jax.array_types import Array, Float, Positions, Queries, Shaped
from carat_jax.families import ModelConfig
from carat_jax.numerics.attention import KeyView, RotatedView, visible


@dataclasses.dataclass
class Taps:
    """What to keep of one traced step over a single sequence that starts at position 0.

    Attributes:
      wanted: full names, of those that `tap_names` lists.
      found: the arrays, by name, without the batch axis.
    """

    wanted: frozenset[str] = frozenset()
    found: dict[str, Array] = dataclasses.field(default_factory=dict)

    def put(self, name: str, value: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B T *rest"]:
        """Offers an array of rows, and returns it."""
        if name in self.wanted:
            self.found[name] = value[0]
        return value

    def put_attention(
        self,
        prefix: str,
        q: Queries,
        query_pos: Positions,
        view: KeyView | RotatedView,
        window: int | None,
    ) -> None:
        """Offers scores and probabilities `[N, T, T]`, keys in the order of their positions.

        A kernel never has them in memory: they are worked out here from what `attend` was given.
        """
        names = f"{prefix}.scores", f"{prefix}.probs"
        if not self.wanted.isdisjoint(names):
            scores = _scores(q, query_pos, view, window)
            found = dict(zip(names, (scores, jax.nn.softmax(scores, axis=-1)), strict=True))
            self.found |= {name: value for name, value in found.items() if name in self.wanted}


# Of every step that is not a trace.
NO_TAPS = Taps()


def _scores(
    q: Queries, query_pos: Positions, view: KeyView | RotatedView, window: int | None
) -> Float[Array, "N T T"]:
    """Float32 scores by head, query and key position; -inf where a key is not visible."""
    num_kv, num_rows = view.v.shape[1], q.shape[1]
    q = view.fold(q) if isinstance(view, RotatedView) else q.astype(view.v.dtype)
    grouped = q.reshape(*q.shape[:2], num_kv, -1, q.shape[-1])
    by_slot = view.scores(grouped, view.v.shape[2])[0]
    mask = visible(query_pos, view.positions, window)[0]
    by_slot = jnp.where(mask, by_slot, -jnp.inf).reshape(-1, *mask.shape)
    # What holds nothing has no position and is dropped.
    places = jnp.where(view.positions[0] < 0, num_rows, view.positions[0])
    nothing = jnp.full((by_slot.shape[0], num_rows, num_rows), -jnp.inf)
    return nothing.at[:, :, places].set(by_slot, mode="drop")


def tap_names(config: ModelConfig) -> tuple[str, ...]:
    """Every array there is, in the order of the computation.

    `embed`, `layers.I.residual` (the stream after layer I), `layers.I.logits` (the logit lens: the
    model's own norm and head on that stream), `layers.I.attn.q` and, where the layer owns them,
    `.k`, `.v` (normed, rotated), `.attn.scores` and `.probs`; `.attn.out`, `.mlp.out` and, where
    there are per-layer inputs, `.per_layer.out` (each before its norm); in a mixture
    `.router.experts` (ids, the likeliest first), `.router.weights` and `.experts.out` (before its
    norm); `hidden` (after the final norm, what the head reads) and `logits` (after the soft cap).
    """
    names = ["embed"]
    for layer in config.layers:
        parts = ["attn.q", *(("attn.k", "attn.v") if layer.owns_kv else ())]
        parts += ["attn.scores", "attn.probs", "attn.out", "mlp.out"]
        parts += ["router.experts", "router.weights", "experts.out"] if layer.num_experts else []
        parts += ["per_layer.out"] if config.hidden_size_per_layer_input else []
        names += [f"layers.{layer.index}.{part}" for part in (*parts, "residual", "logits")]
    return (*names, "hidden", "logits")
