"""The MTP assistants of Gemma 4 as data: what one is, and whether it fits a target.

An assistant is a small text model that owns no keys: its local layers read the cache of the
target's last local layer that owns one, its global layers that of the last global one.
`AssistantConfig` is therefore a `ModelConfig` whose layers all borrow, from owners that stand
outside the model (`LOCAL_KEYS`, `GLOBAL_KEYS`), with the sizes of the projections and the head.

Sources: the published configurations, and `Gemma4AssistantConfig` of transformers 5.17.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from carat_jax.families import FAMILIES, LayerSpec, ModelConfig, from_hf

# `LayerSpec.kv_owner` of an assistant's layers: no layer of its own has a negative index.
LOCAL_KEYS, GLOBAL_KEYS = -2, -1
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantConfig(ModelConfig):
    """The facts of one assistant; the inherited fields are those of its own text section.

    Attributes:
      backbone_hidden_size: the target's `hidden_size`.
      use_ordered_embeddings: whether the head looks at the best clusters of tokens only.
      num_centroids: clusters of the vocabulary, all of one size.
      centroid_intermediate_top_k: clusters whose tokens are scored.
    """

    backbone_hidden_size: int
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32

    def __post_init__(self) -> None:
        """Refuse what no assistant is."""
        super().__post_init__()
        for name in (
            *("hidden_size_per_layer_input", "enable_moe_block"),
            *("use_double_wide_mlp", "num_kv_shared_layers"),
        ):
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported in an assistant")
        if not self.use_ordered_embeddings:
            return
        if self.num_centroids < 1 or self.vocab_size % self.num_centroids:
            raise ValueError(
                f"vocab_size={self.vocab_size} is not a multiple of "
                f"num_centroids={self.num_centroids}: every token must be in a cluster"
            )
        if not 1 <= self.centroid_intermediate_top_k <= self.num_centroids:
            raise ValueError(
                f"centroid_intermediate_top_k={self.centroid_intermediate_top_k} is not between 1 "
                f"and num_centroids={self.num_centroids}"
            )

    def layer(self, index: int) -> LayerSpec:
        """What layer `index` is. A local one sees the last W + 1 keys, as in transformers.

        A query of a normal model sees itself and W - 1 keys before it. transformers masks an
        assistant by a two-sided window of W to either side, turned towards the past.
        """
        spec = super().layer(index)
        if spec.is_sliding:
            return dataclasses.replace(spec, kv_owner=LOCAL_KEYS, window=self.sliding_window + 1)
        return dataclasses.replace(spec, kv_owner=GLOBAL_KEYS)

    def check_fits(self, target: ModelConfig) -> None:
        """Refuses a target whose caches, states or tokens this assistant cannot read.

        Raises:
          ValueError: everything that differs, each with both numbers.
        """
        faults = []

        def compare(name: str, own: Any, wanted: Any, wanted_name: str | None = None) -> None:
            if own != wanted:
                faults.append(f"{name}={own}, but {wanted_name or name}={wanted} in the target")

        compare(
            "backbone_hidden_size", self.backbone_hidden_size, target.hidden_size, "hidden_size"
        )
        names = "vocab_size sliding_window sliding_rope_theta full_rope_theta".split()
        for name in (*names, "partial_rotary_factor", "rope_factor"):
            compare(name, getattr(self, name), getattr(target, name))
        owners = last_owners(target)
        for is_sliding in {layer.is_sliding for layer in self.layers}:
            kind = "local" if is_sliding else "global"
            if is_sliding not in owners:
                faults.append(f"{kind} layers, but the target has none that owns a cache")
                continue
            own = next(layer for layer in self.layers if layer.is_sliding == is_sliding)
            wanted = target.layer(owners[is_sliding])
            compare(f"head dimension of {kind} layers", own.head_dim, wanted.head_dim)
            compare(f"KV heads of {kind} layers", own.num_kv_heads, wanted.num_kv_heads)
        if faults:
            raise ValueError(f"the assistant does not fit its target: {'; '.join(faults)}")


def last_owners(target: ModelConfig) -> dict[bool, int]:
    """The layers whose caches an assistant reads: the last owning one, by `is_sliding`."""
    return {layer.is_sliding: layer.index for layer in target.kv_owners}


def assistant_from_hf(config: Mapping[str, Any]) -> AssistantConfig:
    """Reads an assistant's published `config.json`.

    Raises:
      ValueError: it is not an assistant, a key is missing, or has a value that is not implemented.
    """
    if (kind := config.get("model_type")) not in MODEL_TYPES:
        raise ValueError(f"config.json: model_type={kind!r} is not an assistant ({MODEL_TYPES})")
    text = config.get("text_config")
    required = ["backbone_hidden_size"]
    if config.get("use_ordered_embeddings"):
        required += ["num_centroids", "centroid_intermediate_top_k"]
    if missing := [key for key in required if config.get(key) is None]:
        raise ValueError(f"config.json: missing {', '.join(missing)}")
    if not isinstance(text, Mapping):
        raise ValueError("config.json: missing text_config")
    if text.get("num_kv_shared_layers") not in (None, 0, text.get("num_hidden_layers")):
        raise ValueError(
            f"config.json: num_kv_shared_layers={text['num_kv_shared_layers']} of "
            f"{text.get('num_hidden_layers')} layers: an assistant owns no cache"
        )
    own = from_hf({**text, "num_kv_shared_layers": 0})
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    extra = {key: config[key] for key in required} | {
        "use_ordered_embeddings": bool(config.get("use_ordered_embeddings"))
    }
    return AssistantConfig(**{name: getattr(own, name) for name in names}, **extra)


def _for(name: str, **sizes: Any) -> AssistantConfig:
    """An assistant for a target of that name: what both must share is the target's."""
    target = FAMILIES[name]
    shared = (
        "vocab_size head_dim global_head_dim sliding_window max_position_embeddings "
        "num_key_value_heads num_global_key_value_heads attention_k_eq_v"
    ).split()
    num_layers = sizes.pop("num_hidden_layers", 4)
    return AssistantConfig(
        **{key: getattr(target, key) for key in shared},
        backbone_hidden_size=target.hidden_size,
        num_hidden_layers=num_layers,
        layer_types=("sliding_attention",) * (num_layers - 1) + ("full_attention",),
        final_logit_softcapping=None,
        **sizes,
    )


_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "use_ordered_embeddings": True,
}
_LARGE = {"hidden_size": 1024, "intermediate_size": 8192}

ASSISTANTS: dict[str, AssistantConfig] = {
    "e2b": _for("e2b", **_SMALL),
    "e4b": _for("e4b", **_SMALL),
    "12b": _for("12b", **_LARGE, num_attention_heads=16),
    "26b-a4b": _for("26b-a4b", **_LARGE, num_attention_heads=16),
    "31b": _for("31b", **_LARGE, num_attention_heads=32),
    "tiny": _for(
        "tiny", num_hidden_layers=2, hidden_size=96, intermediate_size=256, num_attention_heads=4
    ),
}
