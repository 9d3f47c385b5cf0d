"""Published checkpoints of arbitrary bits, and what a model must hold after loading one."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from carat_jax.model.checkpoint import load_params, read_config
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import split
from tests.toys import CONFIGS, tensor_shapes, write_checkpoint

PUBLISHED = "model.language_model."


def random_bits(config, seed=0, dtype=np.uint16):
    """Tensors of arbitrary bits: NaNs with payloads, infinities, subnormals, both zeros."""
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == np.uint16 else np.float32
    return {
        name: rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True).view(kind)
        for name, shape in tensor_shapes(config).items()
    }


def specs_of(folder: Path, dtype="bfloat16"):
    return split(Gemma4(read_config(folder)[0], dtype))[1]


def load(folder: Path, dtype="bfloat16"):
    return load_params(folder, specs_of(folder, dtype))


def expected_layer(config, weights, i):
    """A layer's parameters, written out per element group and not through `TensorSource`."""

    def tensor(name):
        return weights[f"layers.{i}.{name}"]

    is_sliding = config["layer_types"][i] == "sliding_attention"
    k_eq_v = config["attention_k_eq_v"] and not is_sliding
    num_kv = config["num_global_key_value_heads" if k_eq_v else "num_key_value_heads"]
    dim = config["head_dim" if is_sliding else "global_head_dim"]
    group = config["num_attention_heads"] // num_kv
    q, o = tensor("self_attn.q_proj.weight"), tensor("self_attn.o_proj.weight")
    heads = [q[h * dim : (h + 1) * dim].T for h in range(num_kv * group)]
    owns = i < config["num_hidden_layers"] - config["num_kv_shared_layers"]
    rows = []
    for k in range(num_kv):
        row = heads[k * group : (k + 1) * group]
        for part in ("k_proj", "v_proj")[: (0 if not owns else 1 if k_eq_v else 2)]:
            row.append(tensor(f"self_attn.{part}.weight")[k * dim : (k + 1) * dim].T)
        rows.append(np.stack(row, axis=1))
    gate, up = tensor("mlp.gate_proj.weight"), tensor("mlp.up_proj.weight")
    params = {
        "self_attn.qkv_proj": np.stack(rows, axis=1),
        "self_attn.o_proj": o.T.reshape(num_kv, group, dim, -1),
        "self_attn.q_norm.weight": tensor("self_attn.q_norm.weight"),
        "mlp.gate_up_proj": np.stack([gate.T, up.T], axis=1),
        "mlp.down_proj": tensor("mlp.down_proj.weight").T,
        "layer_scalar": tensor("layer_scalar"),
    }
    if owns:
        params["self_attn.k_norm.weight"] = tensor("self_attn.k_norm.weight")
    for side in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        params[f"{side}_layernorm.weight"] = tensor(f"{side}_layernorm.weight")
    if config["enable_moe_block"]:
        packed = tensor("experts.gate_up_proj")
        params["experts.gate_up_proj"] = np.stack(np.split(packed, 2, axis=1), axis=1)
        params["experts.down_proj"] = tensor("experts.down_proj")
        params["router.proj"] = tensor("router.proj.weight")
        for name in (
            *("router.scale", "router.per_expert_scale"),
            *("pre_feedforward_layernorm_2.weight", "post_feedforward_layernorm_1.weight"),
            "post_feedforward_layernorm_2.weight",
        ):
            params[name] = tensor(name)
    if config["hidden_size_per_layer_input"]:
        params["per_layer_input.gate"] = tensor("per_layer_input_gate.weight").T
        params["per_layer_input.projection"] = tensor("per_layer_projection.weight").T
        params["per_layer_input.norm.weight"] = tensor("post_per_layer_input_norm.weight")
    return {f"layers.{i}.{name}": array for name, array in params.items()}


def expected(config, weights):
    params = {"embed_tokens": weights["embed_tokens.weight"], "norm.weight": weights["norm.weight"]}
    for i in range(config["num_hidden_layers"]):
        params |= expected_layer(config, weights, i)
    if config["hidden_size_per_layer_input"]:
        ple = "per_layer_embedding."
        params[ple + "embed_tokens_per_layer"] = weights["embed_tokens_per_layer.weight"]
        projection = weights["per_layer_model_projection.weight"]
        params[ple + "per_layer_model_projection"] = projection.T
        norm = weights["per_layer_projection_norm.weight"]
        params[ple + "per_layer_projection_norm.weight"] = norm
    return params


def flat(params):
    leaves = jax.tree.leaves_with_path(params)
    return {".".join(str(k.key) for k in path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_bits(params, wanted):
    found = flat(params)
    assert sorted(found) == sorted(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


def refusal(folder, dtype="bfloat16") -> str:
    specs = specs_of(folder, dtype)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (callers look at the text)
        load_params(folder, specs)
    return str(caught.value)


def t4(folder, weights=None, **options):
    config = CONFIGS["T4"]
    return write_checkpoint(folder, config, weights or random_bits(config), **options)
