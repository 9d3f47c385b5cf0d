"""Every kernel lowers for the GPUs it declares, on a machine without one, under its own name."""

import jax
import jax.numpy as jnp
import pytest

from tests.kernels import bodies, cases
from tests.kernels.lowering import lower

DEVICES = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
NAMES = {
    "ring": "carat_ring_attention",
    "grouped": "carat_grouped_attention_kv",
    "v_rot": "carat_grouped_attention_v_rot",
    "per_head": "carat_per_head_attention",
    "prefill": "carat_prefill_attention_kv",
    "prefill_v_rot": "carat_prefill_attention_v_rot",
    "prefill_ring": "carat_prefill_ring_attention",
}


def _distinct():
    """(case, device) for every kernel, shape of rows, tile and width that is lowered at all."""
    seen = {}
    for device in DEVICES:
        for case in (*cases.FULL, *cases.SMALL):
            tile = bodies.tile(case, device)
            capability = "8.0" if "A100" in device else "9.0"
            key = (case.kernel, case.head_dim, case.rotated, tile, capability)
            seen.setdefault(key, (case, device))
    return list(seen.values())


def _lower(case, device, impl="triton"):
    return lower(bodies.call(case, impl), bodies.shapes(case), device)


@pytest.mark.parametrize(
    ("case", "device"), _distinct(), ids=lambda x: str(x).removeprefix("NVIDIA ").split("-SXM")[0]
)
def test_every_declared_shape_lowers(case, device):
    text = _lower(case, device)
    tile = bodies.tile(case, device)
    assert f'name = "{NAMES[case.kernel]}"' in text
    assert f"num_warps = {tile.warps} : i32" in text
    assert f"num_stages = {tile.stages} : i32" in text
    assert ("_combine" in text) == (tile.splits > 1)


def test_the_jnp_code_puts_no_kernel_into_the_module():
    assert "carat_" not in _lower(cases.FULL[0], DEVICES[0], impl="xla")


def test_without_a_gpu_an_h200_stands_in():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    from pallas_kernels import tiles

    assert tiles.current_device() == "NVIDIA H200"
    assert jnp.zeros(()).devices().pop().platform == "cpu"
