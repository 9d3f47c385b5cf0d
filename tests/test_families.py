"""Configs as published, as re-saved, and as they must be refused; the five sizes as data."""

import logging
import math

import jax.numpy as jnp
import pytest

from carat_jax.families import FAMILIES, from_hf, named_size
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import num_bytes, split
from tests.toys import CONFIGS, config_json, tensor_shapes

FORMS = ("nested", "flat", "resaved", "resaved_flat")


def published(size: str) -> dict:
    """The flat text config of a released size, written down from its published config.json."""
    hidden, layers, period, heads, kv, global_kv, mlp, window, context = {
        "e2b": (1536, 35, 5, 8, 1, None, 6144, 512, 131072),
        "e4b": (2560, 42, 6, 8, 2, None, 10240, 512, 131072),
        "12b": (3840, 48, 6, 16, 8, 1, 15360, 1024, 262144),
        "26b-a4b": (2816, 30, 6, 16, 8, 2, 2112, 1024, 262144),
        "31b": (5376, 60, 6, 32, 16, 4, 21504, 1024, 262144),
    }[size]
    small, mixture = size in ("e2b", "e4b"), size == "26b-a4b"
    return CONFIGS["T4"] | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": [
            "full_attention" if i % period == period - 1 else "sliding_attention"
            for i in range(layers)
        ],
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_global_key_value_heads": global_kv,
        "head_dim": 256,
        "global_head_dim": 512,
        "intermediate_size": mlp,
        "use_double_wide_mlp": size == "e2b",
        "sliding_window": window,
        "max_position_embeddings": context,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256 if small else 0,
        "num_kv_shared_layers": {"e2b": 20, "e4b": 18}.get(size, 0),
        "attention_k_eq_v": not small,
        "enable_moe_block": mixture,
        "num_experts": 128 if mixture else None,
        "top_k_experts": 8 if mixture else None,
        "moe_intermediate_size": 704 if mixture else None,
    }


@pytest.mark.parametrize("size", ["e2b", "e4b", "12b", "26b-a4b", "31b"])
@pytest.mark.parametrize("form", FORMS)
def test_published_config_of_every_size_reads_as_the_family(size, form):
    assert from_hf(config_json(published(size), form)) == FAMILIES[size]


@pytest.mark.parametrize("name", CONFIGS)
def test_all_forms_of_a_config_read_alike(name):
    configs = [from_hf(config_json(CONFIGS[name], form)) for form in FORMS]
    assert all(config.layers == configs[0].layers for config in configs)
    assert configs[0].layers[-1].head_dim == CONFIGS[name]["global_head_dim"]


@pytest.mark.parametrize(
    ("size", "num_params", "num_tensors", "num_full", "num_sliding"),
    [
        ("e2b", 4_628_569_379, 540, 3, 12),
        ("e4b", 7_463_013_418, 665, 4, 20),
        ("12b", 11_907_350_320, 666, 8, 40),
        ("26b-a4b", 25_233_141_790, 657, 5, 25),
        ("31b", 30_697_345_340, 832, 10, 50),
    ],
)
def test_sizes_have_the_published_parameters(size, num_params, num_tensors, num_full, num_sliding):
    specs = leaves(split(Gemma4(FAMILIES[size], jnp.dtype("bfloat16")))[1])
    sources = [source for spec in specs for source in spec.tensors]
    assert sum(math.prod(spec.shape) for spec in specs) == num_params
    assert sum(math.prod(source.shape) for source in sources) == num_params
    assert {s.name: s.shape for s in sources} == tensor_shapes(published(size))
    assert len(sources) == num_tensors
    kinds = [layer.is_sliding for layer in FAMILIES[size].kv_owners]
    assert (kinds.count(False), kinds.count(True)) == (num_full, num_sliding)
    assert sum(spec.num_bytes for spec in specs) == 2 * num_params


def leaves(specs):
    if isinstance(specs, dict):
        return [leaf for node in specs.values() for leaf in leaves(node)]
    return [specs]


def test_bytes_are_those_of_the_leaves():
    specs = split(Gemma4(FAMILIES["tiny"], jnp.dtype("float32")))[1]
    assert num_bytes(specs) == 4 * sum(math.prod(leaf.shape) for leaf in leaves(specs))


def test_every_layer_of_the_mixture_has_experts_beside_its_mlp():
    layers = FAMILIES["26b-a4b"].layers
    sizes = [(x.mlp_width, x.num_experts, x.top_k_experts, x.expert_width) for x in layers]
    assert sizes == [(2112, 128, 8, 704)] * 30
    dense = [(x.num_experts, x.top_k_experts, x.expert_width) for x in FAMILIES["31b"].layers]
    assert dense == [(0, 0, 0)] * 60


@pytest.mark.parametrize(
    ("size", "borrower", "owner"),
    [
        ("e2b", 15, 13),
        ("e2b", 19, 14),
        ("e2b", 33, 13),
        ("e2b", 34, 14),
        ("e4b", 24, 22),
        ("e4b", 29, 23),
        ("e4b", 41, 23),
        ("31b", 58, 58),
    ],
)
def test_borrowing_layers_read_the_last_owner_of_their_kind(size, borrower, owner):
    assert FAMILIES[size].layer(borrower).kv_owner == owner


def test_double_width_starts_with_the_first_borrowing_layer():
    widths = [layer.mlp_width for layer in FAMILIES["e2b"].layers]
    assert widths == [6144] * 15 + [12288] * 20
    assert {layer.mlp_width for layer in FAMILIES["e4b"].layers} == {10240}


def test_global_kv_heads_count_only_where_keys_are_values():
    on = from_hf(CONFIGS["T4"])
    off = from_hf(CONFIGS["T4"] | {"attention_k_eq_v": False})
    assert [on.layer(i).num_kv_heads for i in (1, 2)] == [2, 1]
    assert [off.layer(i).num_kv_heads for i in (1, 2)] == [2, 2]
    assert [off.layer(i).k_eq_v for i in (1, 2)] == [False, False]


def test_layer_types_default_to_five_to_one_and_the_last_is_global():
    config = CONFIGS["T4"] | {"layer_types": None, "num_hidden_layers": 8}
    kinds = [layer.is_sliding for layer in from_hf(config).layers]
    assert kinds == [True] * 5 + [False, True, False]


def test_text_section_wins_over_the_outer_config():
    outer = config_json(CONFIGS["T4"]) | {"vocab_size": 7, "hidden_size": 7, "head_dim": 7}
    assert from_hf(outer) == from_hf(CONFIGS["T4"])


def test_rope_numbers_are_read_from_the_file():
    config = CONFIGS["T4"] | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 123.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 456.0,
                "partial_rotary_factor": 0.5,
                "factor": 8.0,
            },
        }
    }
    read = from_hf(config)
    numbers = (
        read.sliding_rope_theta,
        read.full_rope_theta,
        read.partial_rotary_factor,
        read.rope_factor,
    )
    assert numbers == (123.0, 456.0, 0.5, 8.0)


def test_absent_softcap_means_none():
    config = {k: v for k, v in CONFIGS["T4"].items() if k != "final_logit_softcapping"}
    assert from_hf(config).final_logit_softcapping is None
    assert from_hf(config | {"final_logit_softcapping": None}).final_logit_softcapping is None
    assert from_hf(CONFIGS["T4"]).final_logit_softcapping == 30.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 5 + ["linear_attention"]}, "linear_attention"),
        ({"hidden_size": None}, "hidden_size"),
        ({"head_dim": None}, "head_dim"),
        ({"global_head_dim": None}, "global_head_dim"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 4}, "layer 2"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 0}, "vocab_size_per"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1.0},
                    "full_attention": {"rope_type": "yarn", "rope_theta": 1.0},
                }
            },
            "yarn",
        ),
        ({"enable_moe_block": True}, "num_experts"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, "moe_intermediate_size"),
        (
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 5,
                "moe_intermediate_size": 8,
            },
            "top_k_experts=5",
        ),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"per_layer_config": {"2": {"head_dim": 32}, "5": {"head_dim": 8}}}, "per_layer_config"),
        ({"per_layer_config": {"2": {"mlp": 1}, "5": {"mlp": 1}}}, "mlp"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("form", ["nested", "flat"])
def test_impossible_config_is_refused_by_key(change, named, form):
    config = config_json(CONFIGS["T4"] | change, form)
    with pytest.raises(ValueError, match=named):
        from_hf(config)


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_unknown_key_is_said_once_and_known_ones_are_not(form, caplog):
    with caplog.at_level(logging.WARNING):
        from_hf(config_json(CONFIGS["T4"], form))
        assert not caplog.records
        from_hf(config_json(CONFIGS["T4"] | {"sliding_windw": 9}, form))
    assert [record for record in caplog.records if "sliding_windw" in record.getMessage()]


def test_a_size_can_be_cut_to_its_first_layers():
    cut = named_size("31b/6")
    assert cut.layers == FAMILIES["31b"].layers[:6]
    assert [layer.is_sliding for layer in cut.layers] == [True] * 5 + [False]
    assert named_size("31b") is FAMILIES["31b"]
    for name, words in (
        ("31b/7", "the last layer must be full_attention"),
        ("31b/0", "has 1 to 60 layers, not '0'"),
        ("31b/61", "not '61'"),
        ("e2b/5", "num_kv_shared_layers=20"),
        ("32b", "'32b' is none of"),
    ):
        with pytest.raises(ValueError, match=words):
            named_size(name)
