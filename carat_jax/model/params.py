"""How a module declares a parameter, and what everyone else reads off the declaration.

`param(...)` makes an `nnx.Param` that holds a shape instead of an array, with a `ParamSpec` beside
it. From the specs of a model follow its random weights, its loading, its sharding and its size.
Parameters travel as plain nested dicts and lists keyed like the modules: `nnx.jit` and `nnx.State`
cost milliseconds a call with hundreds of leaves.
"""

import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Index = slice | int


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """One tensor of a published checkpoint and its place inside a parameter.

    The tensor `file` is placed as `parameter[index] = file.reshape(view).transpose(order)`.

    Attributes:
      name: the tensor's name after the text model's prefix, `layers.3.self_attn.q_proj.weight`; a
        leading "/" marks the full name of a tensor that stands outside the text model.
      shape: its shape in the file.
      view, order: how to read it; empty means as it is.
      index: where it lands; empty means the tensor is the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    index: tuple[Index, ...] = ()


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Everything there is to know about a parameter without its values.

    Attributes:
      shape: shape in memory.
      dtype: storage type.
      axes: logical name of each axis, for `numerics.sharding`; None is never split.
      fan_in: width summed over in a product; 0 marks a vector that starts at one.
      tensors: the checkpoint tensors that fill it.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    fan_in: int
    tensors: tuple[TensorSource, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def param(
    shape: tuple[int, ...],
    dtype: Any,
    axes: tuple[str | None, ...],
    tensors: tuple[TensorSource, ...],
    fan_in: int | None = None,
) -> nnx.Param:
    """Declares a parameter; `fan_in` defaults to the first axis."""
    spec = ParamSpec(shape, dtype, axes, shape[0] if fan_in is None else fan_in, tensors)
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), spec=spec)


def vector(name: str, width: int, dtype: Any) -> nnx.Param:
    """Declares a norm weight or scale, stored under `name`."""
    return param((width,), dtype, (None,), (TensorSource(name, (width,)),), fan_in=0)


def matrix(name: str, num_in: int, num_out: int, axes: tuple, dtype: Any) -> nnx.Param:
    """Declares a `[in, out]` matrix that the checkpoint stores as `[out, in]` under `name`."""
    source = TensorSource(name, (num_out, num_in), view=(num_out, num_in), order=(1, 0))
    return param((num_in, num_out), dtype, axes, (source,))


def split(model: nnx.Module) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """A model's graph, and the specs of its parameters as a nested dict."""
    graph, state = nnx.split(model)
    leaves = {path: leaf.get_metadata()["spec"] for path, leaf in nnx.to_flat_state(state)}
    return graph, _nest(leaves)


def merge(graph: nnx.GraphDef, params: Mapping[str, Any]) -> nnx.Module:
    """The model with `params` in place; call it inside the traced function."""
    return nnx.merge(graph, nnx.State(params))


def random_params(specs: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Seeded random weights, made on the device leaf by leaf.

    Matrices are normal with variance 1 / fan_in, vectors are one, so that activations keep their
    size through any depth and logits stay in the range of a trained model's. Ids are in order.
    """
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    key = jax.random.key(seed, impl="rbg")
    kinds = [(spec.shape, jnp.dtype(spec.dtype).name, spec.fan_in) for spec in leaves]
    # One executable for each kind of parameter, compiled side by side.
    with ThreadPoolExecutor() as pool:
        for kind in sorted(set(kinds)):
            pool.submit(_random_leaf.lower(key, np.uint32(0), *kind).compile)
    made = [_random_leaf(key, np.uint32(i), *kind) for i, kind in enumerate(kinds)]
    return jax.tree.unflatten(tree, made)


def num_bytes(specs: Any) -> int:
    """Bytes of all parameters of a nested dict of specs; () has none."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    return sum(spec.num_bytes for spec in leaves)


@jax.jit(static_argnames=("shape", "dtype", "fan_in"))
def _random_leaf(key, index, shape, dtype, fan_in):
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.arange(*shape, dtype=dtype)
    if not fan_in:
        return jnp.ones(shape, dtype)
    normal = jax.random.normal(jax.random.fold_in(key, index), shape, dtype)
    return (normal * jnp.float32(fan_in**-0.5)).astype(dtype)


def _nest(leaves: Mapping[tuple, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
