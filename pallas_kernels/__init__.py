"""Kernels in Pallas on Triton, each behind one function with an oracle of its signature.

Imports nothing of `carat_jax`; the engine calls these functions and knows nothing about GPUs.
"""

from pallas_kernels.append_attention import append_attention, borrow_attention
from pallas_kernels.expert_mlp import expert_mlp, expert_shares
from pallas_kernels.expert_router import route_experts
from pallas_kernels.few_rows import (
    few_row_parts,
    few_row_product,
    gated_row_parts,
    sum_parts,
)
from pallas_kernels.grouped_attention import grouped_attention
from pallas_kernels.per_head_attention import per_head_attention
from pallas_kernels.prefill_attention import prefill_attention, prefill_ring_attention
from pallas_kernels.reference import merge_partials
from pallas_kernels.residual_norm import mixture_norm, residual_norm
from pallas_kernels.ring_attention import ring_attention

__all__ = [
    "append_attention",
    "borrow_attention",
    "expert_mlp",
    "expert_shares",
    "few_row_parts",
    "few_row_product",
    "gated_row_parts",
    "grouped_attention",
    "merge_partials",
    "mixture_norm",
    "per_head_attention",
    "prefill_attention",
    "prefill_ring_attention",
    "residual_norm",
    "ring_attention",
    "route_experts",
    "sum_parts",
]
