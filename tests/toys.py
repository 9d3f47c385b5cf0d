"""Toy Gemma 4 models: small text configs, seeded random weights, and published-format folders.

`CONFIGS` holds flat text configs as the checkpoints publish them; `make_weights` gives tensors
under checkpoint names without a prefix; `write_checkpoint` writes the forms such files come in.
The weights are tame (moderate scores, so that float32 rounding is not amplified) but never neutral:
no norm weight and no layer_scalar is 1, because a forgotten factor of 1 is invisible.
Imports nothing of carat_jax, so that what it writes is judged by what is read.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

EOS_IDS = (1, 106, 50)


def _layer_types(num_layers: int, period: int) -> list[str]:
    return [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention"
        for i in range(num_layers)
    ]


def _config(period: int, **sizes) -> dict:
    return {
        "model_type": "gemma4_text",
        "vocab_size": 320,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 320,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "layer_types": _layer_types(sizes["num_hidden_layers"], period),
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
        **sizes,
    }


_T4 = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "sliding_window": 8,
}

# The last five keep the real sizes' ratios: layer pattern, heads per KV head, query width and MLP
# width over hidden width, about half of E2B's and E4B's layers borrowing.
CONFIGS = {
    "T4": _config(3, **_T4, attention_k_eq_v=True),
    "T4e": _config(
        3,
        **_T4,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        use_double_wide_mlp=True,
    ),
    "31b": _config(
        6,
        hidden_size=84,
        intermediate_size=336,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        attention_k_eq_v=True,
        sliding_window=16,
        use_bidirectional_attention="vision",
    ),
    "12b": _config(
        6,
        model_type="gemma4_unified_text",
        hidden_size=120,
        intermediate_size=480,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=1,
        head_dim=8,
        global_head_dim=16,
        attention_k_eq_v=True,
        sliding_window=16,
        use_bidirectional_attention="vision",
    ),
    "e2b": _config(
        5,
        hidden_size=48,
        intermediate_size=192,
        num_hidden_layers=10,
        num_attention_heads=8,
        head_dim=8,
        global_head_dim=16,
        num_kv_shared_layers=5,
        hidden_size_per_layer_input=16,
        use_double_wide_mlp=True,
        sliding_window=8,
    ),
    "e4b": _config(
        6,
        hidden_size=80,
        intermediate_size=320,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_kv_shared_layers=6,
        hidden_size_per_layer_input=8,
        sliding_window=8,
    ),
    "26b": _config(
        6,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        attention_k_eq_v=True,
        sliding_window=16,
        use_bidirectional_attention="vision",
        enable_moe_block=True,
        num_experts=10,
        top_k_experts=3,
        moe_intermediate_size=16,
    ),
}
SIZES = ("31b", "12b", "e2b", "e4b", "26b")


def layer_shapes(config: Mapping, layer: int) -> dict[str, tuple[int, ...]]:
    """Names inside layer `layer` and shapes as stored, for a text config."""
    is_sliding = config["layer_types"][layer] == "sliding_attention"
    is_borrower = layer >= config["num_hidden_layers"] - config["num_kv_shared_layers"]
    k_eq_v = config["attention_k_eq_v"] and not is_sliding
    width = config["head_dim" if is_sliding else "global_head_dim"]
    kv_heads = config["num_global_key_value_heads" if k_eq_v else "num_key_value_heads"]
    hidden, q_width, kv_width = (
        config["hidden_size"],
        config["num_attention_heads"] * width,
        kv_heads * width,
    )
    mlp = config["intermediate_size"] * (2 if config["use_double_wide_mlp"] and is_borrower else 1)
    shapes = {
        f"{name}.weight": (hidden,)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    }
    shapes |= {
        "layer_scalar": (1,),
        "self_attn.q_proj.weight": (q_width, hidden),
        "self_attn.q_norm.weight": (width,),
        "self_attn.o_proj.weight": (hidden, q_width),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    if not is_borrower:
        shapes["self_attn.k_proj.weight"] = (kv_width, hidden)
        shapes["self_attn.k_norm.weight"] = (width,)
        if not k_eq_v:
            shapes["self_attn.v_proj.weight"] = (kv_width, hidden)
    if config["enable_moe_block"]:
        count, width = config["num_experts"], config["moe_intermediate_size"]
        shapes |= {
            "router.proj.weight": (count, hidden),
            "router.scale": (hidden,),
            "router.per_expert_scale": (count,),
            "experts.gate_up_proj": (count, 2 * width, hidden),
            "experts.down_proj": (count, hidden, width),
            "pre_feedforward_layernorm_2.weight": (hidden,),
            "post_feedforward_layernorm_1.weight": (hidden,),
            "post_feedforward_layernorm_2.weight": (hidden,),
        }
    if ple := config["hidden_size_per_layer_input"]:
        shapes["per_layer_input_gate.weight"] = (ple, hidden)
        shapes["per_layer_projection.weight"] = (hidden, ple)
        shapes["post_per_layer_input_norm.weight"] = (hidden,)
    return shapes


def tensor_shapes(config: Mapping) -> dict[str, tuple[int, ...]]:
    """Every text tensor of a checkpoint, by its name without a prefix."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    shapes = {"embed_tokens.weight": (config["vocab_size"], hidden), "norm.weight": (hidden,)}
    if ple := config["hidden_size_per_layer_input"]:
        shapes["embed_tokens_per_layer.weight"] = (
            config["vocab_size_per_layer_input"],
            layers * ple,
        )
        shapes["per_layer_model_projection.weight"] = (layers * ple, hidden)
        shapes["per_layer_projection_norm.weight"] = (ple,)
    for i in range(layers):
        for name, shape in layer_shapes(config, i).items():
            shapes[f"layers.{i}.{name}"] = shape
    return shapes


def make_weights(
    config: Mapping, seed: int = 0, dtype=np.float32, calm: bool = False
) -> dict[str, np.ndarray]:
    """Seeded random tensors under checkpoint names; bfloat16 ones are rounded from the same draw.

    q_norm sets the size of the scores and the post_* norms the share of each block in the residual:
    both small, so that transformers in float32 stays within 4e-5 of float64 on every toy. `calm`
    halves both and keeps the residual alive through the layers, for comparisons of bfloat16
    rounding: in the plain weights one score that flips early outweighs all the rest.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("router.proj.weight"):
            tensor = rng.normal(0.0, 1.0, shape)  # scores of about 1: a choice, not a lottery
        elif len(shape) >= 2:
            tensor = rng.normal(0.0, 0.25 if name.startswith("embed") else 0.12, shape)
        elif name.endswith("layer_scalar"):
            tensor = rng.uniform(0.88, 0.94, shape) if calm else rng.uniform(0.3, 0.9, shape)
        elif name.endswith("q_norm.weight"):
            tensor = rng.uniform(0.1, 0.4, shape) * (0.5 if calm else 1.0)
        elif ".post_" in name:
            tensor = rng.uniform(0.2, 0.6, shape) * (0.5 if calm else 1.0)
        else:
            tensor = rng.uniform(0.5, 1.5, shape)
        weights[name] = tensor.astype(dtype)
    return weights


def make_ids(config: Mapping, length: int, seed: int = 0) -> list[int]:
    """A BOS and random ordinary ids."""
    rng = np.random.default_rng([seed, length])
    return [2, *rng.integers(110, config["vocab_size"] - 8, length - 1).tolist()]


# Files.

_DTYPE_NAMES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
}


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one safetensors file: header length, JSON header, data."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def resaved(config: Mapping) -> dict:
    """The text config as transformers 5.17 saves it: per-layer overrides, no global_* keys."""
    config = dict(config)
    override = {"head_dim": config.pop("global_head_dim")}
    kv_heads = config.pop("num_global_key_value_heads")
    if config["attention_k_eq_v"]:
        override["num_key_value_heads"] = kv_heads
    digits = len(str(config["num_hidden_layers"] - 1))
    config["per_layer_config"] = {
        f"{i:0{digits}d}": override
        for i, kind in enumerate(config["layer_types"])
        if kind == "full_attention"
    }
    return config


def config_json(config: Mapping, form: str = "nested") -> dict:
    """The content of config.json.

    Args:
        config: A flat text config.
        form: "nested" (as published: the text config under `text_config`), "flat" (the text config
            alone), "resaved" or "resaved_flat" (the same two with `per_layer_config`).
    """
    text = resaved(config) if form.startswith("resaved") else dict(config)
    unified = config["model_type"] == "gemma4_unified_text"
    family = "Gemma4Unified" if unified else "Gemma4"
    if form in ("flat", "resaved_flat"):
        return {"architectures": [f"{family}ForCausalLM"], "dtype": "float32", **text}
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": "gemma4_unified" if unified else "gemma4",
        "dtype": "float32",
        "text_config": text,
        "vision_config": None,
        "audio_config": None,
        "image_token_id": config["vocab_size"] - 1,
        "audio_token_id": config["vocab_size"] - 2,
        "video_token_id": config["vocab_size"] - 3,
        "eos_token_id": list(EOS_IDS[:2]),
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def write_checkpoint(
    folder: Path,
    config: Mapping,
    weights: Mapping[str, np.ndarray],
    *,
    form: str = "nested",
    prefix: str | None = None,
    num_shards: int = 1,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    generation_config: Mapping | None = None,
) -> Path:
    """Write config.json, generation_config.json and the tensors; returns the folder.

    Args:
        folder: Created where missing.
        config: A flat text config.
        weights: Tensors by name without a prefix; their dtype is kept.
        form: See `config_json`.
        prefix: Put before every name but lm_head's; by default the one that goes with the form.
        num_shards: 1 writes model.safetensors, more write numbered files and an index.
        extra_tensors: Further tensors under their full names (towers, strangers).
        generation_config: Merged over the default one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if prefix is None:
        prefix = "model." if form in ("flat", "resaved_flat") else "model.language_model."
    (folder / "config.json").write_text(json.dumps(config_json(config, form), indent=1))
    generation = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": list(EOS_IDS)}
    generation |= generation_config or {}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))

    named = {
        name if name.startswith("lm_head") else prefix + name: tensor
        for name, tensor in weights.items()
    } | dict(extra_tensors or {})
    if num_shards == 1:
        save_safetensors(folder / "model.safetensors", named)
        return folder
    files = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    weight_map = {name: files[i * num_shards // len(named)] for i, name in enumerate(named)}
    for file in files:
        save_safetensors(
            folder / file, {name: named[name] for name in named if weight_map[name] == file}
        )
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in named.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return folder
