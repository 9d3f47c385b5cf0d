"""Which implementation computes the parts of a layer that have several, as one static value.

Each choice is another executable of the same sum, rounded differently; nothing falls back from one
to another. What was asked for is in the settings; `engine.shapes` makes this of it.
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class ComputeOptions:
    """How a model's layers are computed.

    Attributes:
      impl: attention by "xla", or by the Pallas kernels, "triton" or "interpret".
      is_fused: one kernel a layer instead of scores, softmax and values one after the other.
      group_heads: query heads of one KV head form one matrix.
      fuse_rows: norms, RoPE, cache writes and residual sums join their neighbours' kernels.
      products: a layer's products of few rows by "xla", by the Pallas kernel, "triton" or
        "interpret", or by the kernel where it was "measured" to be no slower.
      num_keys: keys a global layer's three separate stages look at; None looks at the whole cache.
      experts: products of a mixture's experts: "dense" or "ragged_dot" in plain JAX, or the Pallas
        kernel, "triton" or "interpret"; see `numerics.experts`.
    """

    impl: str = "xla"
    is_fused: bool = True
    group_heads: bool = True
    fuse_rows: bool = True
    products: str = "xla"
    num_keys: int | None = None
    experts: str = "dense"

    @property
    def joins_rows(self) -> bool:
        """Whether kernels take in the operations on single rows beside them."""
        return self.impl != "xla" and self.fuse_rows

    @property
    def joins_experts(self) -> bool:
        """Whether the sum over a token's experts joins the norms after it in one kernel."""
        return self.joins_rows and self.experts in ("triton", "interpret")

    @property
    def ring_block(self) -> int:
        """What a ring's capacity must be a multiple of."""
        return 1 if self.impl == "xla" else 64


# Plain JAX, grouped, over whole caches.
PLAIN = ComputeOptions()


def compiler_options() -> dict[str, str]:
    """What XLA is told about the steps on this machine's backend, beyond its defaults.

    On a GPU two things, measured on an H200:

    - XLA rewrites the product of one row with fewer than 10 M weights into a multiplication and a
      sum, and may write the products out: 36 MB of traffic a layer instead of 12 for the 26B's
      `down_proj`, a decode step of 3.85 ms instead of 3.37. That pass is left out.
    - Kernels of a step that do not depend on one another run side by side, such as a mixture's MLP
      and its experts: a decode step of the 26B takes 2.86 ms instead of 3.19.
    """
    if jax.default_backend() != "gpu":
        return {}
    return {
        "xla_disable_hlo_passes": "dot-strength-reduction",
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    }
