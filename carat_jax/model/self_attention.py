"""Self-attention of one layer: fused projections, head norms, RoPE, cache, softmax, output.

`qkv_proj` keeps its axes apart, `[D, K, G + 2, H]`, so that KV heads can be split over devices.
Formulas: transformers 5.17, `Gemma4TextAttention`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from carat_jax.array_types import Array, Branch, Float, Hidden, Queries
from carat_jax.cache.append import Projection, append_attend, borrow_attend, fits_one_kernel
from carat_jax.cache.bank import Cache
from carat_jax.families import LayerSpec, ModelConfig
from carat_jax.model.norm import RMSNorm
from carat_jax.model.params import TensorSource, param
from carat_jax.model.step_context import StepContext
from carat_jax.numerics.attention import ChunkView, KeyView, RotatedView, attend
from carat_jax.numerics.layers import linear, rms_norm, rope_frequencies, rotate


class Attention(nnx.Module):
    """Self-attention of one layer; a layer without keys of its own reads another's."""

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike):
        spec, prefix = config.layer(index), f"layers.{index}.self_attn"
        self.spec, self.eps = spec, config.rms_norm_eps
        num_kv, dim, width = spec.num_kv_heads, spec.head_dim, config.hidden_size
        self.group = group = config.num_attention_heads // num_kv
        parts = [("q_proj", slice(0, group))]
        if spec.owns_kv:
            parts.append(("k_proj", slice(group, group + 1)))
            if not spec.k_eq_v:
                parts.append(("v_proj", slice(group + 1, group + 2)))
        num_parts = parts[-1][1].stop

        def source(name: str, where: slice) -> TensorSource:
            heads = where.stop - where.start
            return TensorSource(
                f"{prefix}.{name}.weight",
                shape=(num_kv * heads * dim, width),
                view=(num_kv, heads, dim, width),
                order=(3, 0, 1, 2),
                index=(slice(None), slice(None), where),
            )

        self.qkv_proj = param(
            (width, num_kv, num_parts, dim),
            dtype,
            axes=("embed", "kv_heads", None, None),
            tensors=tuple(source(name, where) for name, where in parts),
        )
        self.o_proj = param(
            (num_kv, group, dim, width),
            dtype,
            axes=("kv_heads", None, None, "embed"),
            fan_in=num_kv * group * dim,
            tensors=(
                TensorSource(
                    f"{prefix}.o_proj.weight",
                    shape=(width, num_kv * group * dim),
                    view=(width, num_kv, group, dim),
                    order=(1, 2, 3, 0),
                ),
            ),
        )
        self.q_norm = RMSNorm(f"{prefix}.q_norm", dim, config.rms_norm_eps, dtype)
        if spec.owns_kv:
            self.k_norm = RMSNorm(f"{prefix}.k_norm", dim, config.rms_norm_eps, dtype)

    def __call__(self, x: Hidden, step: StepContext) -> Branch:
        """Attends from `x` `[B, T, D]`; writes the layer's cache in `step` if it owns one."""
        spec, group = self.spec, self.group
        with jax.named_scope("qkv"):
            fused = linear(x, self.qkv_proj.get_value(), products=step.options.products)
        cache = step.caches.get(spec.index)
        keys = cache if spec.owns_kv else step.views[spec.kv_owner]
        if step.slots is None and fits_one_kernel(keys, x.shape[1], group, step.options):
            with jax.named_scope("attend"):
                out = (self._append if spec.owns_kv else self._borrow)(keys, fused, step)
        else:
            out = self._attend(cache, fused, step)
        with jax.named_scope("o"):
            heads = out.reshape(*x.shape[:2], spec.num_kv_heads, group, spec.head_dim)
            out = linear(
                heads, self.o_proj.get_value(), 3, step.options.products, step.options.joins_rows
            )
            return step.taps.put(f"layers.{spec.index}.attn.out", out)

    def _append(
        self, cache: Cache, fused: Float[Array, "B T K parts H"], step: StepContext
    ) -> Queries:
        """Everything between the projections in one kernel."""
        spec = self.spec
        new = Projection(
            fused,
            self.group,
            self.q_norm.weight.get_value(),
            self.k_norm.weight.get_value(),
            self.eps,
            step.rope[spec.is_sliding],
        )
        cache, out = append_attend(
            cache, new, step.starts, step.num_valid, spec.window, step.options
        )
        step.caches[spec.index] = cache
        step.views[spec.index] = cache.view(step.starts + step.num_valid, None)
        return out

    def _borrow(
        self, view: KeyView, fused: Float[Array, "B T K G H"], step: StepContext
    ) -> Queries:
        """The same where another layer owns the keys."""
        spec, weight = self.spec, self.q_norm.weight.get_value()
        tables, starts = step.rope[spec.is_sliding], step.positions[:, 0]
        return borrow_attend(
            view, fused, weight, self.eps, tables, starts, spec.window, step.options
        )

    def _attend(
        self, cache: Cache | None, fused: Float[Array, "B T K parts H"], step: StepContext
    ) -> Queries:
        """Norms, RoPE, cache rows and attention, one after the other."""
        spec, group, tables = self.spec, self.group, step.rope[self.spec.is_sliding]
        name = f"layers.{spec.index}.attn"
        with jax.named_scope("qkv"):
            q = rotate(self.q_norm(fused[..., :group, :]), tables, dtype=jnp.float32)
        if spec.owns_kv:
            with jax.named_scope("cache"):
                raw_k = fused[..., group, :]
                # Where keys equal values, the value is the raw key projection: not normed by
                # k_norm and not rotated.
                raw_v = raw_k if spec.k_eq_v else fused[..., group + 1, :]
                k, v = rotate(self.k_norm(raw_k), tables), rms_norm(raw_v, eps=self.eps)
                step.taps.put(f"{name}.k", k), step.taps.put(f"{name}.v", v)
                step.caches[spec.index], view = cache.extend(
                    k, v, step.starts, step.num_valid, step.slots, spec.window
                )
                if isinstance(view, RotatedView):
                    view = dataclasses.replace(view, key_weight=self.k_norm.weight.get_value())
                step.views[spec.index] = view
        with jax.named_scope("attend"):
            heads = step.taps.put(f"{name}.q", q.reshape(*q.shape[:2], -1, spec.head_dim))
            view = step.views[spec.kv_owner]
            step.taps.put_attention(name, heads, step.positions, view, spec.window)
            out = attend(heads, step.positions, view, spec.window, step.options)
        if spec.owns_kv and isinstance(view, ChunkView):
            # Rows that wait for what reads the ring before them: free to come first, they would
            # make XLA copy the ring, of every slot.
            k, v, out = jax.lax.optimization_barrier((k, v, out))
            step.caches[spec.index], _ = cache.extend(
                k, v, step.starts, step.num_valid, step.slots, spec.window
            )
        return out


def layer_frequencies(config: ModelConfig, layer: LayerSpec) -> Float[np.ndarray, "half"]:
    """RoPE frequencies of a layer; see `rope_frequencies`."""
    if layer.is_sliding:
        return rope_frequencies(layer.head_dim, config.sliding_rope_theta)
    return rope_frequencies(
        layer.head_dim, config.full_rope_theta, config.partial_rotary_factor, config.rope_factor
    )
