"""Lowering for a GPU on a machine without one."""

import warnings

import jax


def lower(function, arrays, device):
    """Text of `function` of `arrays` (or their shapes), lowered for a device by its name."""
    kind = jax.sharding.AbstractDevice(device, None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = jax.jit(function).trace(*arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
