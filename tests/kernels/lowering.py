"""Lowering for a GPU on a machine without one.

Every kernel's own module is verified as well: JAX writes it as bytes without looking, and what is
malformed would only show where Triton reads it, on a GPU.
"""

import contextlib
import warnings

import jax
from jax._src.pallas.triton import lowering as triton_lowering

_lower_kernel = triton_lowering.lower_jaxpr_to_triton_module


def _lower_and_verify(*args, **kwargs):
    result = _lower_kernel(*args, **kwargs)
    assert result.module.operation.verify()
    return result


triton_lowering.lower_jaxpr_to_triton_module = _lower_and_verify


@contextlib.contextmanager
def device_of_name(device):
    """What is traced and lowered meanwhile is for a device by its name."""
    kind = jax.sharding.AbstractDevice(device, None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def lower(function, arrays, device):
    """Text of `function` of `arrays` (or their shapes), lowered for a device by its name."""
    with device_of_name(device):
        traced = jax.jit(function).trace(*arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
