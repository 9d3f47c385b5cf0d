"""How many experts a timed pass of a mixture reads: the union of its rows' choices, counted.

By chance four tokens would take 29 of 128 experts, but tokens in one pass are not chance: drafts of
one text have much in common. So the choices of the very rows that a step passes are collected by
taps, at the state it is in, and each layer's distinct experts are counted.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from carat_jax.array_types import Array, Lengths, Shaped, Tokens
from carat_jax.bench.device_steps import DeviceStep
from carat_jax.cache.bank import CacheBank
from carat_jax.decoding.state import DecodeState
from carat_jax.engine.engine import EngineLoop
from carat_jax.families import ModelConfig
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import merge, split
from carat_jax.model.taps import Taps
from carat_jax.numerics.options import ComputeOptions, compiler_options


class _EverySlot(Taps):
    """Keeps the rows of all slots, where a trace has one."""

    def put(self, name: str, value: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Offers an array of rows, and returns it."""
        if name in self.wanted:
            self.found[name] = value
        return value


def experts_read(steps: Mapping[Any, DeviceStep], samples: int = 8) -> dict[Any, float | None]:
    """Of each step the distinct experts a layer, on average over layers and over some calls.

    Each call is looked at before it is made, so that what is counted goes on where the timing
    stopped; of several rounds in one call the first. None of a model without experts.
    """
    found: dict[Any, float | None] = dict.fromkeys(steps)
    counters: dict[Any, Callable] = {}  # steps that compute alike share one
    for name, step in steps.items():
        loop = step.loop
        if not loop.model.enable_moe_block:
            continue
        graph = _graph(loop.model, loop.config.dtype)
        key = loop.model, loop.options.compute
        count = counters[key] = counters.get(key) or _counter(graph, *key)
        rows_of = _rows_of_round(graph, loop)
        counted = []
        for _ in range(samples):
            rows = step.rows or rows_of(loop._params, loop._state)
            counted.append(count(loop._params, loop._state.bank, *rows))
            step.queue(1)
        found[name] = float(np.mean(jax.device_get(counted)))
    return found


@functools.cache
def _graph(model: ModelConfig, dtype: str) -> nnx.GraphDef:
    return split(Gemma4(model, jnp.dtype(dtype)))[0]


def _jit(function: Callable) -> Callable:
    return jax.jit(function, compiler_options=compiler_options())


def _rows_of_round(graph: Any, loop: EngineLoop) -> Callable[..., tuple[Tokens, Lengths]]:
    """A compiled function of parameters and state: the rows that a round passes next."""

    def rows(params: Any, state: DecodeState) -> tuple[Tokens, Lengths]:
        target = merge(graph, params["target"])
        proposal, _ = loop.drafter.propose(params["draft"], state.draft, target, state)
        return proposal.rows(state, loop.options.uniform_rows)

    return _jit(rows)


def _counter(graph: Any, model: ModelConfig, options: ComputeOptions) -> Callable[..., Array]:
    """A compiled function of parameters, caches and rows: their distinct experts a layer."""
    counts = {x.index: x.num_experts for x in model.layers if x.num_experts}
    names = {index: f"layers.{index}.router.experts" for index in counts}

    def count(params: Any, bank: CacheBank, tokens: Tokens, num_valid: Lengths) -> Array:
        taps, target = _EverySlot(frozenset(names.values())), merge(graph, params["target"])
        target(tokens, bank, num_valid, options=options, taps=taps)
        read = [
            (jnp.bincount(taps.found[names[index]].reshape(-1), length=num + 1)[:num] > 0).sum()
            for index, num in counts.items()
        ]
        return jnp.stack(read).mean()

    return _jit(count)
