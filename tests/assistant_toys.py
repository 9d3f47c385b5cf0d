"""Toy assistants: published-format configs, seeded random tensors and folders, as in `toys`.

Imports nothing of carat_jax.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.toys import layer_shapes, save_safetensors

_TEXT = {"hidden_size": 32, "intermediate_size": 48, "final_logit_softcapping": None}
_CENTROIDS = {"num_centroids": 20, "centroid_intermediate_top_k": 3}


def assistant_config(target: Mapping, *, centroids: bool = False, **text: object) -> dict:
    """config.json of an assistant of `target`, a flat text config: three local layers, a global."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    unified = target["model_type"] == "gemma4_unified_text"
    sizes = {"layer_types": kinds} | _TEXT | text
    num_layers = len(sizes["layer_types"])
    return {
        "architectures": [f"Gemma4{'Unified' * unified}AssistantForCausalLM"],
        "model_type": f"gemma4_{'unified_' * unified}assistant",
        "dtype": "float32",
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": centroids,
        **_CENTROIDS,
        "tie_word_embeddings": True,
        "text_config": {
            **target,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
            **sizes,
            "num_hidden_layers": num_layers,
            "num_kv_shared_layers": num_layers,
        },
    }


def assistant_shapes(config: Mapping) -> dict[str, tuple[int, ...]]:
    """Every tensor of the assistant but `token_ordering`, by its full name."""
    text, backbone = config["text_config"], config["backbone_hidden_size"]
    vocab, width = text["vocab_size"], text["hidden_size"]
    shapes = {
        "pre_projection.weight": (width, 2 * backbone),
        "post_projection.weight": (backbone, width),
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    for i in range(text["num_hidden_layers"]):
        for name, shape in layer_shapes(text, i).items():
            shapes[f"model.layers.{i}.{name}"] = shape
    if config["use_ordered_embeddings"]:
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], width)
    return shapes


def assistant_weights(
    config: Mapping, seed: int = 0, dtype=np.float32, ordering: str = "random"
) -> dict[str, np.ndarray]:
    """Seeded random tensors; scores of a few units, so that what a query sees is felt."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in assistant_shapes(config).items():
        if len(shape) == 2:
            tensor = rng.normal(0.0, 0.25, shape)
        elif name.endswith("q_norm.weight"):
            tensor = rng.uniform(0.2, 0.6, shape)
        else:
            tensor = rng.uniform(0.5, 1.5, shape)
        weights[name] = tensor.astype(dtype)
    if config["use_ordered_embeddings"]:
        ids = np.arange(config["text_config"]["vocab_size"], dtype=np.int64)
        order = {"random": rng.permutation(ids), "identity": ids}[ordering]
        weights["masked_embedding.token_ordering"] = order
    return weights


def write_assistant(
    folder: Path, config: Mapping, weights: Mapping[str, np.ndarray], **generation: object
) -> Path:
    """Writes config.json, generation_config.json and model.safetensors; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": 1} | generation
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    save_safetensors(folder / "model.safetensors", weights)
    return folder
