"""Which assistants exist, which fit which target, and what their files must hold."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.assistant_families import ASSISTANTS, assistant_from_hf
from carat_jax.families import FAMILIES, from_hf
from carat_jax.model.assistant import Assistant, load_assistant
from carat_jax.model.params import random_params, split
from tests.assistant_pair import F32, pair
from tests.assistant_toys import assistant_config, assistant_shapes, write_assistant
from tests.toy_model import toy
from tests.toys import CONFIGS

# Sizes, and what does not fit.


@pytest.mark.parametrize(
    ("name", "num_params", "num_tensors"),
    [
        ("e2b", 77_993_476, 50),
        ("e4b", 78_779_908, 50),
        ("12b", 422_856_964, 48),
        ("26b-a4b", 419_711_236, 48),
        ("31b", 469_518_596, 48),
    ],
)
def test_published_assistants_have_their_published_size(name, num_params, num_tensors):
    specs = split(Assistant(ASSISTANTS[name], FAMILIES[name], jnp.dtype("bfloat16")))[1]
    leaves = jax.tree.leaves(specs)
    assert sum(math.prod(spec.shape) for spec in leaves) == num_params
    assert sum(len(spec.tensors) for spec in leaves) == num_tensors


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"hidden_size": 72}, ("backbone_hidden_size=64", "hidden_size=72")),
        ({"vocab_size": 321}, ("vocab_size=320", "vocab_size=321")),
        ({"sliding_window": 16}, ("sliding_window=8", "sliding_window=16")),
        ({"head_dim": 32}, ("head dimension of local layers=16", "32")),
        ({"global_head_dim": 64}, ("head dimension of global layers=32", "64")),
        ({"num_key_value_heads": 4}, ("KV heads of local layers=2", "4")),
        ({"num_global_key_value_heads": 2}, ("KV heads of global layers=1", "2")),
    ],
)
def test_an_assistant_that_does_not_fit_is_refused_with_both_numbers(change, numbers):
    config = assistant_from_hf(assistant_config(CONFIGS["T4"]))
    target = from_hf(CONFIGS["T4"] | change)
    with pytest.raises(ValueError, match="does not fit") as refusal:
        Assistant(config, target, F32)
    for number in numbers:
        assert number in str(refusal.value)


@pytest.mark.parametrize(
    ("top", "text", "message"),
    [
        ({"num_centroids": 19}, {}, "vocab_size=320 is not a multiple of num_centroids=19"),
        ({"centroid_intermediate_top_k": 21}, {}, "top_k=21 is not between 1 and num_centroids=20"),
        ({"num_centroids": None}, {}, "missing num_centroids"),
        ({"backbone_hidden_size": None}, {}, "missing backbone_hidden_size"),
        ({"model_type": "gemma4"}, {}, "model_type='gemma4' is not an assistant"),
        ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 of 4"),
        (
            {},
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320},
            "hidden_size_per_layer_input=8",
        ),
        ({}, {"use_double_wide_mlp": True}, "use_double_wide_mlp=True"),
    ],
)
def test_a_config_that_is_no_assistant_is_refused(top, text, message):
    raw = assistant_config(CONFIGS["T4"], centroids=True) | top
    raw["text_config"] = raw["text_config"] | text
    with pytest.raises(ValueError, match=message):
        assistant_from_hf(raw)


def test_random_weights_know_every_token():
    config = assistant_from_hf(assistant_config(CONFIGS["T4"], centroids=True))
    specs = split(Assistant(config, toy("T4").config, F32))[1]
    ids = random_params(specs["masked_embedding"], seed=0)["token_ordering"]
    assert ids.dtype == jnp.int32
    assert ids.tolist() == list(range(320))


# Files.


@pytest.mark.parametrize("ordering", ["", "random"])
def test_a_published_folder_loads_bit_for_bit(tmp_path, ordering):
    drafter = pair("T4", ordering)
    write_assistant(tmp_path, drafter.raw, drafter.weights)
    _, params = load_assistant(tmp_path, drafter.target.config, F32)
    jax.tree.map(np.testing.assert_array_equal, params, drafter.params)


def test_faults_of_a_folder_are_named(tmp_path):
    drafter = pair("T4", "random")
    target, dtype = drafter.target.config, F32
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_assistant(tmp_path, target, dtype)
    ids = drafter.weights["masked_embedding.token_ordering"].copy()
    ids[7] = ids[8]
    name = "masked_embedding.token_ordering"
    write_assistant(tmp_path, drafter.raw, drafter.weights | {name: ids})
    with pytest.raises(ValueError, match="holds 319 of the 320 token ids"):
        load_assistant(tmp_path, target, dtype)
    write_assistant(tmp_path, drafter.raw, drafter.weights | {name: ids.astype(np.float32)})
    with pytest.raises(ValueError, match=name):
        load_assistant(tmp_path, target, dtype)
    norm = {"model.norm.weight": np.ones(32, np.int64)}
    write_assistant(tmp_path, drafter.raw, drafter.weights | norm)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_assistant(tmp_path, target, dtype)
    rest = {k: v for k, v in drafter.weights.items() if k != "pre_projection.weight"}
    write_assistant(tmp_path, drafter.raw, rest | {"model.pre_projection.weight": np.zeros(3)})
    with pytest.raises(ValueError, match="problems") as refusal:
        load_assistant(tmp_path, target, dtype)
    assert "missing tensors: pre_projection.weight" in str(refusal.value)
    assert "unknown text tensors: model.pre_projection.weight" in str(refusal.value)
    with pytest.raises(ValueError, match="backbone_hidden_size=64, but hidden_size=72"):
        load_assistant(tmp_path, dataclasses.replace(target, hidden_size=72), dtype)


def test_shapes_of_the_toy_are_those_of_the_published_form():
    config = assistant_from_hf(assistant_config(CONFIGS["T4"], centroids=True))
    specs = split(Assistant(config, toy("T4").config, F32))[1]
    ours = {
        source.name[1:] if source.name.startswith("/") else f"model.{source.name}": source.shape
        for spec in jax.tree.leaves(specs)
        for source in spec.tensors
    }
    wanted = assistant_shapes(assistant_config(CONFIGS["T4"], centroids=True))
    assert ours == wanted | {"masked_embedding.token_ordering": (320,)}
