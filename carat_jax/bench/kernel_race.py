"""Kernels raced on one chain, each checked against an oracle before its time is recorded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from carat_jax.bench import measure
from carat_jax.families import FAMILIES

WINDOW, CAPACITY = 1024, 1088


def attention_shapes(model):
    """Heads, KV heads and head dimension of a model's global and of its local layers."""
    config = FAMILIES[model]
    kinds = {layer.is_sliding: layer for layer in config.layers}
    return [
        {
            "heads": config.num_attention_heads,
            "kv_heads": kinds[is_sliding].num_kv_heads,
            "head_dim": kinds[is_sliding].head_dim,
        }
        for is_sliding in (False, True)
    ]


GLOBAL, LOCAL = attention_shapes("31b")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_array(seed, shape, scale=1.0, valid=None):
    """Normal bfloat16 numbers; rows of the third axis from `valid` on are NaN."""
    x = scale * jax.random.normal(jax.random.key(seed, impl="rbg"), shape, jnp.bfloat16)
    return x if valid is None else x.at[:, :, valid:].set(jnp.nan)


def relative_error(got, want):
    """Norm of the difference over that of what was wanted."""
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def checked_race(
    records, fixed, variants, oracle, x, layers, *, moved=None, ceiling=None, **timing
):
    """Times, checks and records variants: name -> (function, name of its layers).

    Args:
      records: where the records go, each with what `fixed` says.
      oracle: what every variant must give for `x` and the first of its layers.
      moved: bytes that a variant must read; with `ceiling`, bytes a second, its rate is recorded.
      timing: `length` and what else `measure.race` takes.
    """
    by_name = {name: layers[kind] for name, (_, kind) in variants.items()}
    functions = {name: function for name, (function, _) in variants.items()}
    times = measure.race(functions, x, by_name, **timing)
    for name, found in times.items():
        record = dict(fixed, variant=name, gross_us=found.gross, net_us=found.net)
        if name != "empty":
            record["error"] = error = relative_error(found.output, oracle)
            if not error <= 5e-3:
                logging.error("%s %s: relative error %s", fixed, name, error)
        if moved and name in moved:
            rate = moved[name] / max(found.net, 1e-3) * 1e6
            record |= {"bytes": moved[name], "gb_per_s": rate / 1e9, "of_read": rate / ceiling}
        records.add(**record)
    return times
