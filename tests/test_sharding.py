"""The sharding table: one step over two devices equals the step on one."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from carat_jax.cache.bank import CACHE_AXES
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import split
from carat_jax.numerics.sharding import place, sharding
from tests.toy_model import MAX_ROWS, toy
from tests.toys import make_ids


@pytest.fixture(scope="module")
def mesh():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return Mesh(np.array(jax.devices()[:2]), ("model",))


@pytest.mark.parametrize("name", ["T4", "T4e"])
def test_a_step_on_two_devices_equals_one(name, mesh):
    model = toy(name)
    texts = [make_ids(model.raw, n) for n in (30, 11, 3)]
    bank, _ = model.feed(model.bank(), [ids[:-1] for ids in texts], MAX_ROWS)
    # given parameters and caches split as the table says
    axes = jax.tree.map(lambda spec: spec.axes, split(Gemma4(model.config, model.dtype))[1])
    params = place(model.params, axes, mesh)

    def spread_array(x):
        x = np.array(x)  # a copy: both banks are donated
        return jax.device_put(x, sharding(mesh, CACHE_AXES[: x.ndim], x.shape))

    spread = jax.tree.map(spread_array, bank)
    # when both take the same block
    blocks = [ids[-1:] + [7] * (MAX_ROWS - 1) for ids in texts]
    one_bank, one = model.feed(bank, blocks, MAX_ROWS)
    two_bank, two = dataclasses.replace(model, params=params).feed(spread, blocks, MAX_ROWS)
    # then logits and caches agree
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, b in zip(jax.tree.leaves(one_bank), jax.tree.leaves(two_bank), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    # and a local layer's two KV heads and the MLP's columns really lie on different devices
    layer = params["layers"][0]
    halves = (layer["self_attn"]["qkv_proj"], layer["mlp"]["down_proj"], two_bank.layers[0].k)
    for array, axis in zip(halves, (1, 0, 1), strict=True):
        shapes = {shard.data.shape[axis] for shard in array.addressable_shards}
        assert shapes == {array.shape[axis] // 2}


def test_an_axis_that_does_not_divide_is_copied(mesh):
    axes = ("embed", "kv_heads", None, None)
    assert sharding(mesh, axes, (64, 1, 6, 32)).spec == PartitionSpec(None, None, None, None)
    assert sharding(mesh, axes, (64, 4, 6, 32)).spec == PartitionSpec(None, "model", None, None)


def test_two_axes_on_one_mesh_axis_are_refused(mesh):
    with pytest.raises(ValueError, match="twice"):
        sharding(mesh, ("kv_heads", "mlp"), (4, 4))
