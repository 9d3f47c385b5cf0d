"""A layer's own part of the per-layer inputs, by the kernels and by plain JAX, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.families import from_hf
from carat_jax.model.mlp import PerLayerInput
from carat_jax.model.params import merge, split
from pallas_kernels.product_tiles import MAX_FEW_ROWS
from tests.kernels.lowering import lower
from tests.oracle import gelu_tanh
from tests.toys import CONFIGS

RAW = CONFIGS["e2b"]


@pytest.mark.parametrize("index", [0, 5, 9])
@pytest.mark.parametrize("rows", [(2, 4), (1, MAX_FEW_ROWS), (3, 11)])
def test_a_layer_gates_its_own_part(index, rows):
    rng, width = np.random.default_rng(index), RAW["hidden_size"]
    graph, specs = split(PerLayerInput(from_hf(RAW), index, jnp.float32))
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), jnp.float32), specs)
    x = rng.normal(size=(*rows, width)) / width**0.5
    inputs = rng.normal(size=(*rows, RAW["num_hidden_layers"], RAW["hidden_size_per_layer_input"]))
    gate, projection = (np.asarray(params[name], np.float64) for name in ("gate", "projection"))
    want = (gelu_tanh(x @ gate) * inputs[:, :, index]) @ projection

    for products, in_parts in (("xla", False), ("interpret", False), ("interpret", True)):
        run = jax.jit(
            lambda x, inputs, *told: merge(graph, params)(x, inputs, *told), static_argnums=(2, 3)
        )
        arrays = jnp.asarray(x, jnp.float32), jnp.asarray(inputs, jnp.float32), products, in_parts
        got = np.asarray(run(*arrays))
        got = got.sum(0) if got.ndim > x.ndim else got
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
        has_kernel = "carat_gated_rows" in str(run.trace(*arrays).jaxpr)
        assert has_kernel == (products == "interpret" and rows[0] * rows[1] <= MAX_FEW_ROWS)


@pytest.mark.parametrize(
    ("rows", "device", "has_kernel"),
    [
        (1, "NVIDIA H200", True),
        (4, "NVIDIA H200", True),
        (5, "NVIDIA H200", False),
        (1, "L4", False),
    ],
)
def test_kernels_gate_where_they_were_measured_to_win(rows, device, has_kernel):
    graph, specs = split(PerLayerInput(from_hf(RAW), 1, jnp.bfloat16))
    shapes = (1, rows, RAW["hidden_size"]), (1, rows, RAW["num_hidden_layers"], 16)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), specs)

    def run(params, x, inputs):
        return merge(graph, params)(x, inputs, "measured", True)

    text = lower(run, [params, *arrays], device)
    assert ("carat_gated_rows" in text) == ("carat_few_rows" in text) == has_kernel
