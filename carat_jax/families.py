"""The sizes of Gemma 4 as data, and what each layer of a model is.

`ModelConfig` carries the facts of one model under the names of `config.json`'s text section;
`ModelConfig.layer(i)` answers, for one layer, everything the model, the caches and the loader ask.
Nothing else in the project looks at a model's name or works out a layer's shape.

Sources: the published configurations, and `Gemma4TextConfig` of transformers 5.17. That class's
defaults describe no released model, so no default of it is used here: what is missing is an error.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one decoder layer is.

    `kv_owner` is the layer whose cache this one reads: itself, unless the model shares KV caches.
    `mlp_width` is the width of the dense MLP. `num_experts` is 0 without a mixture beside it; each
    token takes `top_k_experts` of them, MLPs of width `expert_width`.
    """

    index: int
    is_sliding: bool
    num_kv_heads: int
    head_dim: int
    k_eq_v: bool
    kv_owner: int
    mlp_width: int
    num_experts: int
    top_k_experts: int
    expert_width: int
    window: int | None

    @property
    def owns_kv(self) -> bool:
        """Whether this layer projects and caches keys and values of its own."""
        return self.kv_owner == self.index


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The facts of one Gemma 4 text model, named as `config.json` names them.

    The two RoPE variants of the file are flattened: `sliding_rope_theta` for local layers,
    `full_rope_theta`, `partial_rotary_factor` and `rope_factor` for global ones.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    global_head_dim: int
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float | None = 30.0
    sliding_rope_theta: float = 10_000.0
    full_rope_theta: float = 1_000_000.0
    partial_rotary_factor: float = 0.25
    rope_factor: float = 1.0
    tie_word_embeddings: bool = True
    pad_token_id: int = 0
    bos_token_id: int = 2
    eos_token_id: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        """Refuse a shape that no model can have."""
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )
        if unknown := set(self.layer_types) - {_SLIDING, _FULL}:
            raise ValueError(f"layer_types: {sorted(unknown)} is neither {_SLIDING} nor {_FULL}")
        if self.layer_types[-1] != _FULL:
            raise ValueError(f"layer_types: the last layer must be {_FULL} in a Gemma 4")
        if self.hidden_size_per_layer_input and not self.vocab_size_per_layer_input:
            raise ValueError("hidden_size_per_layer_input needs vocab_size_per_layer_input")
        for name in ("head_dim", "global_head_dim"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name}={getattr(self, name)} must be even: RoPE pairs halves")
        if not 0 <= self.num_kv_shared_layers < self.num_hidden_layers:
            raise ValueError(
                f"num_kv_shared_layers={self.num_kv_shared_layers} leaves no layer that owns a "
                f"cache (num_hidden_layers={self.num_hidden_layers})"
            )
        if self.enable_moe_block:
            self._check_mixture()
        for layer in self.layers:
            if self.num_attention_heads % layer.num_kv_heads:
                raise ValueError(
                    f"layer {layer.index}: num_attention_heads={self.num_attention_heads} is not "
                    f"a multiple of its {layer.num_kv_heads} KV heads"
                )

    def _check_mixture(self) -> None:
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            if not getattr(self, name):
                raise ValueError(f"enable_moe_block needs {name}, which is {getattr(self, name)}")
        if self.top_k_experts > self.num_experts:
            raise ValueError(
                f"top_k_experts={self.top_k_experts} is more than num_experts={self.num_experts}"
            )

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers, in order."""
        return tuple(self.layer(i) for i in range(self.num_hidden_layers))

    def layer(self, index: int) -> LayerSpec:
        """What layer `index` is. The only place that reads `layer_types`."""
        is_sliding = self.layer_types[index] == _SLIDING
        k_eq_v = self.attention_k_eq_v and not is_sliding
        # transformers applies num_global_key_value_heads only where keys equal values.
        kv_heads = self.num_key_value_heads
        if k_eq_v and self.num_global_key_value_heads is not None:
            kv_heads = self.num_global_key_value_heads
        shared = index >= self.num_hidden_layers - self.num_kv_shared_layers
        return LayerSpec(
            index=index,
            is_sliding=is_sliding,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim if is_sliding else self.global_head_dim,
            k_eq_v=k_eq_v,
            kv_owner=self._kv_owner(index) if shared else index,
            mlp_width=self.intermediate_size * (2 if self.use_double_wide_mlp and shared else 1),
            num_experts=self.num_experts if self.enable_moe_block else 0,
            top_k_experts=self.top_k_experts if self.enable_moe_block else 0,
            expert_width=self.moe_intermediate_size if self.enable_moe_block else 0,
            window=self.sliding_window if is_sliding else None,
        )

    def rotated_width(self, layer: LayerSpec) -> int:
        """Numbers of a global layer's key that RoPE turns: the first ones of each half."""
        return 2 * int(self.partial_rotary_factor * layer.head_dim // 2)

    def _kv_owner(self, index: int) -> int:
        """The last layer before the shared ones that has the type of layer `index`."""
        owners = range(self.num_hidden_layers - self.num_kv_shared_layers)
        same = [i for i in owners if self.layer_types[i] == self.layer_types[index]]
        if not same:
            raise ValueError(
                f"layer {index} shares the cache of an earlier {self.layer_types[index]} layer, "
                f"but none of the first {len(owners)} layers is one"
            )
        return same[-1]

    @property
    def kv_owners(self) -> tuple[LayerSpec, ...]:
        """The layers that own a cache, in order."""
        return tuple(layer for layer in self.layers if layer.owns_kv)


def _pattern(num_layers: int, period: int) -> tuple[str, ...]:
    return tuple(_SLIDING if (i + 1) % period else _FULL for i in range(num_layers))


_COMMON = {"vocab_size": 262_144, "head_dim": 256, "global_head_dim": 512}
_E_SERIES = _COMMON | {
    "num_attention_heads": 8,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_LARGE = _COMMON | {
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
    "attention_k_eq_v": True,
}

FAMILIES: dict[str, ModelConfig] = {
    "e2b": ModelConfig(
        **_E_SERIES,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=35,
        layer_types=_pattern(35, 5),
        num_key_value_heads=1,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "e4b": ModelConfig(
        **_E_SERIES,
        hidden_size=2560,
        intermediate_size=10_240,
        num_hidden_layers=42,
        layer_types=_pattern(42, 6),
        num_key_value_heads=2,
        num_kv_shared_layers=18,
    ),
    "12b": ModelConfig(
        **_LARGE,
        hidden_size=3840,
        intermediate_size=15_360,
        num_hidden_layers=48,
        layer_types=_pattern(48, 6),
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=1,
    ),
    "26b-a4b": ModelConfig(
        **_LARGE,
        hidden_size=2816,
        intermediate_size=2112,
        num_hidden_layers=30,
        layer_types=_pattern(30, 6),
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "31b": ModelConfig(
        **_LARGE,
        hidden_size=5376,
        intermediate_size=21_504,
        num_hidden_layers=60,
        layer_types=_pattern(60, 6),
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
    ),
    "tiny": ModelConfig(
        vocab_size=4096,
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=12,
        layer_types=_pattern(12, 6),
        num_attention_heads=8,
        num_key_value_heads=4,
        num_global_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=64,
        max_position_embeddings=4096,
        attention_k_eq_v=True,
        eos_token_id=(1, 106),
    ),
}


def named_size(name: str) -> ModelConfig:
    """The model of a size's name: `31b`, or `31b/6` for its first six layers alone.

    Raises:
      ValueError: there is no such size, or no model of so many of its layers.
    """
    size, slash, count = name.partition("/")
    if size not in FAMILIES:
        raise ValueError(f"{size!r} is none of {', '.join(FAMILIES)}")
    facts = FAMILIES[size]
    if not slash:
        return facts
    if not count.isdecimal() or not 0 < int(count) <= facts.num_hidden_layers:
        raise ValueError(f"{size} has 1 to {facts.num_hidden_layers} layers, not {count!r}")
    kinds = facts.layer_types[: int(count)]
    return dataclasses.replace(facts, num_hidden_layers=int(count), layer_types=kinds)


def is_size(name: str) -> bool:
    """Whether `named_size` knows the name."""
    try:
        return bool(named_size(name))
    except ValueError:
        return False


# Keys of a text section that say something only training or multimodal input needs.
_IGNORED = frozenset(
    "model_type architectures dtype torch_dtype initializer_range use_cache attention_dropout "
    "transformers_version use_bidirectional_attention _name_or_path return_dict problem_type "
    "output_attentions output_hidden_states id2label label2id chunk_size_feed_forward "
    "is_encoder_decoder add_cross_attention _attn_implementation text_config".split()
)
# Keys that would change the computation, and the one value of each that is implemented.
_FIXED: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_PLAIN = frozenset(field.name for field in dataclasses.fields(ModelConfig)) - {
    *("layer_types", "global_head_dim", "eos_token_id"),
    *("sliding_rope_theta", "full_rope_theta", "partial_rotary_factor", "rope_factor"),
}
_REQUIRED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim sliding_window max_position_embeddings"
).split()


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a published `config.json`: nested under `text_config`, or flat.

    Both ways of writing the global layers' shape are understood: `global_head_dim` with
    `num_global_key_value_heads` (as published) and `per_layer_config` (as transformers 5.17 saves).

    Raises:
      ValueError: a key is missing, or has a value that is not implemented; the key is named.
    """
    text = config.get("text_config") or config
    if missing := [key for key in _REQUIRED if text.get(key) is None]:
        raise ValueError(
            f"config.json: missing {', '.join(missing)}; is this a Gemma 4 text model?"
        )
    for key, only in _FIXED.items():
        if text.get(key, only) != only:
            raise ValueError(f"config.json: {key}={text[key]!r} is not supported, only {only!r}")
    if text.get("use_bidirectional_attention") == "all":
        raise ValueError('config.json: use_bidirectional_attention="all" is not a decoder')
    values = {key: text[key] for key in _PLAIN if key in text}
    # Without layer_types transformers takes every sixth layer as global, and the last one always.
    default = (*_pattern(text["num_hidden_layers"], 6)[:-1], _FULL)
    values["layer_types"] = tuple(text.get("layer_types") or default)
    if not text.get("hidden_size_per_layer_input"):
        values.update(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    values.setdefault("final_logit_softcapping", None)
    values.update(_rope(text.get("rope_parameters")))
    values.update(_global_layers(text, values["layer_types"]))
    eos = text.get("eos_token_id")
    values["eos_token_id"] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    known = _PLAIN | _IGNORED | set(_FIXED) | {"layer_types", "global_head_dim", "eos_token_id"}
    known |= {"rope_parameters", "per_layer_config"}
    if unknown := sorted(set(text) - known):
        _log.warning("config.json: keys not used here: %s", ", ".join(unknown))
    return ModelConfig(**values)


def _rope(parameters: Mapping[str, Any] | None) -> dict[str, float]:
    """The four RoPE numbers of a text section (absent: those of every published model)."""
    if parameters is None:
        return {}
    sliding, full = parameters.get(_SLIDING), parameters.get(_FULL)
    if sliding is None or full is None:
        raise ValueError(f"config.json: rope_parameters must have {_SLIDING} and {_FULL}")
    for name, section, kind in ((_SLIDING, sliding, "default"), (_FULL, full, "proportional")):
        if section.get("rope_type", kind) != kind:
            raise ValueError(
                f"config.json: rope_parameters.{name}.rope_type={section['rope_type']!r} "
                f"is not supported, only {kind!r}"
            )
        if section.get("rope_theta") is None:
            raise ValueError(f"config.json: rope_parameters.{name}: missing rope_theta")
    return {
        "sliding_rope_theta": float(sliding["rope_theta"]),
        "full_rope_theta": float(full["rope_theta"]),
        "partial_rotary_factor": float(full.get("partial_rotary_factor", 1.0)),
        "rope_factor": float(full.get("factor", 1.0)),
    }


def _global_layers(text: Mapping[str, Any], layer_types: tuple[str, ...]) -> dict[str, int | None]:
    """Head dimension and KV heads of the global layers, from either form of the file."""
    overrides = text.get("per_layer_config")
    if overrides is None:
        if text.get("global_head_dim") is None:
            raise ValueError("config.json: missing global_head_dim (or per_layer_config)")
        return {"global_head_dim": text["global_head_dim"]}
    by_layer = {int(index): override for index, override in overrides.items()}
    full = [i for i, kind in enumerate(layer_types) if kind == _FULL]
    if set(by_layer) - set(full):
        raise ValueError(
            f"config.json: per_layer_config overrides layers {sorted(set(by_layer) - set(full))}, "
            f"which are not {_FULL}"
        )
    shapes = {tuple(sorted(by_layer.get(i, {}).items())) for i in full}
    if len(shapes) != 1:
        raise ValueError("config.json: per_layer_config must give every global layer one shape")
    shape = dict(shapes.pop())
    if extra := set(shape) - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"config.json: per_layer_config: {sorted(extra)} is not supported")
    return {
        "global_head_dim": shape.get("head_dim", text["head_dim"]),
        "num_global_key_value_heads": shape.get("num_key_value_heads"),
    }
