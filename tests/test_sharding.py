"""One prefill and one decode step on two devices, placed by the table, equal one device.

The devices are virtual (`conftest` asks XLA for two). The toy has two local KV heads, which split,
and one global one, which cannot and is copied; its MLP columns split.
"""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from carat_jax.cache.bank import CACHE_AXES
from carat_jax.decoding.steps import SamplerKind
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import ParamSpec, split
from carat_jax.numerics.sharding import place, sharding
from tests.engine.toy_engine import toy
from tests.toy_model import toy as named_toy
from tests.toys import CONFIGS, make_ids

GREEDY = SamplerKind(draws=False, logprobs=True)


@pytest.fixture(scope="module")
def mesh():
    devices = jax.devices("cpu")
    assert len(devices) >= 2
    return Mesh(np.array(devices[:2]), ("model",))


def placed_params(model, mesh):
    _, specs = split(Gemma4(model.config, model.dtype))
    axes = jax.tree.map(lambda spec: spec.axes, specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    return {"target": place(model.params["target"], axes, mesh), "draft": ()}


def placed_state(state, mesh):
    """Caches by their axes, everything else on both devices."""
    axes = jax.tree.map(lambda leaf: (None,) * leaf.ndim, state)
    caches = jax.tree.map(lambda _: CACHE_AXES, state.bank.layers)
    axes.bank.layers.update(caches)
    return place(state, axes, mesh)


def run(model, params, state):
    """Prefills two slots, then decodes once; all that came out, as numpy arrays."""
    told = []
    for slot, length in enumerate((13, 5)):
        ids = make_ids(model.raw, length)
        tokens = np.array([ids + [0] * (16 - length)], np.int32)
        where = np.array([slot], np.int32)
        state, logits = model.steps.prefill(params, state, tokens, np.array([length]), where)
        state, first = model.steps.first(state, logits, where, GREEDY)
        told += [logits, first.tokens, first.logprobs]
    state, drawn = model.steps.round(params, state, GREEDY)
    told += [drawn.tokens, drawn.logprobs, drawn.top_logprobs]
    return state, jax.tree.map(np.asarray, told)


@pytest.mark.parametrize(
    "make",
    [toy, lambda: named_toy("T4e"), lambda: named_toy("26b")],
    ids=["k_eq_v", "borrowing", "mixture"],
)
def test_two_devices_compute_what_one_does(mesh, make):
    model = make()
    one, want = run(model, model.params, model.state())
    two, got = run(model, placed_params(model, mesh), placed_state(model.state(), mesh))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=5e-5)
    for mine, theirs in zip(jax.tree.leaves(two), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), atol=5e-5)
    # and the reference agrees with both
    last = model.reference.logits(make_ids(model.raw, 13))[-1]
    np.testing.assert_allclose(got[0], last, atol=1e-4)


def test_the_table_splits_what_divides_and_copies_the_rest(mesh):
    model = toy()
    params = placed_params(model, mesh)["target"]
    state = placed_state(model.state(), mesh)

    def share(leaf):
        """Bytes on one device over bytes in all."""
        return leaf.addressable_shards[0].data.nbytes / leaf.nbytes

    local, whole = params["layers"][0], params["layers"][2]
    assert share(local["self_attn"]["qkv_proj"]) == 0.5
    assert share(local["self_attn"]["o_proj"]) == 0.5
    assert share(whole["self_attn"]["qkv_proj"]) == 1
    for layer in (local, whole):
        assert [share(leaf) for leaf in jax.tree.leaves(layer["mlp"])] == [0.5, 0.5]
    assert share(params["embed_tokens"]) == 1
    assert [share(state.bank.layers[i].k) for i in (0, 2)] == [0.5, 1]


def test_experts_are_dealt_out_and_their_router_is_copied(mesh):
    layer = placed_params(named_toy("26b"), mesh)["target"]["layers"][0]
    experts = CONFIGS["26b"]["num_experts"]
    for leaf in jax.tree.leaves(layer["experts"]):
        assert [len(shard.data) for shard in leaf.addressable_shards] == [experts // 2] * 2
    for leaf in jax.tree.leaves(layer["router"]):
        assert leaf.addressable_shards[0].data.shape == leaf.shape


def test_caches_stay_where_they_were_put(mesh):
    model = toy()
    state, _ = run(model, placed_params(model, mesh), placed_state(model.state(), mesh))
    shards = state.bank.layers[0].k.addressable_shards
    assert [shard.data.shape[1] for shard in shards] == [1, 1]
    assert {shard.device for shard in shards} == set(mesh.devices.flat)


def test_an_axis_is_split_only_where_it_divides(mesh):
    assert sharding(mesh, ("embed", "mlp"), (6, 8)).spec == PartitionSpec(None, "model")
    assert sharding(mesh, ("embed", "mlp"), (6, 9)).spec == PartitionSpec(None, None)
    with pytest.raises(ValueError, match="twice"):
        sharding(mesh, ("kv_heads", "mlp"), (2, 8))
