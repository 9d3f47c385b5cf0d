"""The MLP of a layer, and the per-layer input that E2B and E4B add after it."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from carat_jax.array_types import Array, Branch, Float, Hidden
from carat_jax.families import ModelConfig
from carat_jax.model.norm import RMSNorm
from carat_jax.model.params import TensorSource, matrix, param
from carat_jax.numerics.layers import few_row_impl, gelu_gate, joined, linear
from pallas_kernels import few_row_parts, gated_row_parts, product_tiles


class MLP(nnx.Module):
    """`down(gelu(gate x) * up x)`."""

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike):
        width, mlp, prefix = (
            config.hidden_size,
            config.layer(index).mlp_width,
            f"layers.{index}.mlp",
        )
        self.gate_up_proj = param(
            (width, 2, mlp),
            dtype,
            axes=("embed", None, "mlp"),
            tensors=tuple(
                TensorSource(
                    f"{prefix}.{name}.weight",
                    shape=(mlp, width),
                    view=(mlp, width),
                    order=(1, 0),
                    index=(slice(None), i),
                )
                for i, name in enumerate(("gate_proj", "up_proj"))
            ),
        )
        self.down_proj = matrix(f"{prefix}.down_proj.weight", mlp, width, ("mlp", "embed"), dtype)

    def __call__(self, x: Hidden, products: str, in_parts: bool) -> Branch:
        """Applies the MLP row by row; `products` and `in_parts` are those of `linear`."""
        with jax.named_scope("gate_up"):
            gate_up = linear(x, self.gate_up_proj.get_value(), products=products)
            gated = gelu_gate(gate_up[..., 0, :], gate_up[..., 1, :])
        with jax.named_scope("down"):
            return linear(gated, self.down_proj.get_value(), 1, products, in_parts)


class PerLayerInput(nnx.Module):
    """The gated per-layer embedding that E2B and E4B add after the MLP."""

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike):
        width, ple, prefix = (
            config.hidden_size,
            config.hidden_size_per_layer_input,
            f"layers.{index}",
        )
        self.gate = matrix(
            f"{prefix}.per_layer_input_gate.weight", width, ple, ("embed", None), dtype
        )
        self.projection = matrix(
            f"{prefix}.per_layer_projection.weight", ple, width, (None, "embed"), dtype
        )
        self.norm = RMSNorm(
            f"{prefix}.post_per_layer_input_norm", width, config.rms_norm_eps, dtype
        )
        self.index = index

    def __call__(
        self, x: Hidden, inputs: Float[Array, "B T L P"], products: str, in_parts: bool
    ) -> Branch:
        """What to add, once `norm`ed, to the residual `x` for the layers' `inputs`.

        `products` and `in_parts` are those of `linear`.
        """
        gate, projection = self.gate.get_value(), self.projection.get_value()
        num_rows = x.size // x.shape[-1]
        impl = few_row_impl(products, num_rows, *gate.shape, product_tiles.per_layer_rows_win)
        if impl == "xla":
            gated = gelu_gate(linear(x, gate), inputs[:, :, self.index])
            return linear(gated, projection)
        gates = few_row_parts(x, gate, impl=impl)
        parts = gated_row_parts(gates, inputs, self.index, projection, impl=impl)
        return joined(parts, projection, in_parts)
