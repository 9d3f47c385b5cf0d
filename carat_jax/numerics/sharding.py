"""Where arrays live: a table from logical axis names to mesh axes.

Parameters and caches name their axes ("embed", "kv_heads", "mlp", ...); this table says which of
them are split over which mesh axis. Another layout is another table.
"""

from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# KV heads (with their query groups), MLP columns and experts are split, all else is copied.
TENSOR_PARALLEL: Mapping[str, str] = {"kv_heads": "model", "mlp": "model", "experts": "model"}


def sharding(
    mesh: Mesh,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    table: Mapping[str, str] = TENSOR_PARALLEL,
) -> NamedSharding:
    """The placement of an array of `shape` whose axes carry the logical names `axes`.

    An axis that the mesh axis does not divide is copied instead: a model with one global KV head
    still runs on two devices.

    Raises:
      ValueError: two axes of one array map to the same mesh axis.
    """
    names = [
        mesh_axis if mesh_axis in mesh.shape and size % mesh.shape[mesh_axis] == 0 else None
        for mesh_axis, size in zip((table.get(a or "") for a in axes), shape, strict=True)
    ]
    used = [name for name in names if name is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {axes} map to one mesh axis twice under {dict(table)}")
    return NamedSharding(mesh, PartitionSpec(*names))


def place(tree, axes, mesh: Mesh, table: Mapping[str, str] = TENSOR_PARALLEL):
    """Puts every array of `tree` where `axes`, a tree of axis-name tuples, says."""
    return jax.tree.map(
        lambda x, names: jax.device_put(x, sharding(mesh, names, x.shape, table)), tree, axes
    )
