"""How many experts a timed pass of a mixture reads: the union of its rows' choices, counted.

By chance four tokens would take 29 of 128 experts, but tokens in one pass are not chance: drafts of
one text have much in common. So the choices of the very rows that a step passes are collected by
taps, at the state it is in, and each layer's distinct experts are counted.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.array_types import Array, Float, Lengths, Shaped, Tokens
from carat_jax.bench.device_steps import DeviceStep
from carat_jax.decoding.state import DecodeState
from carat_jax.engine.engine import EngineLoop
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import merge, split
from carat_jax.model.taps import Taps


class _EverySlot(Taps):
    """Keeps the rows of all slots, where a trace has one."""

    def put(self, name: str, value: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Offers an array of rows, and returns it."""
        if name in self.wanted:
            self.found[name] = value
        return value


def experts_read(step: DeviceStep, samples: int = 8) -> float | None:
    """Distinct experts a layer, on average over the layers and over some calls of a timed step.

    Each call is looked at before it is made, so that what is counted goes on where the timing
    stopped. None of a model without experts.
    """
    loop, found = step.loop, []
    if not any(layer.num_experts for layer in loop.model.layers):
        return None
    count = _counter(loop)
    for _ in range(samples):
        found.append(count(loop._params, loop._state, step.rows))
        step.queue(1)
    return float(np.mean(jax.device_get(found)))


def _counter(loop: EngineLoop) -> Callable[..., Float[Array, ""]]:
    """A function of parameters, state and rows, which are those of the next round if None."""
    graph, _ = split(Gemma4(loop.model, jnp.dtype(loop.config.dtype)))
    counts = {x.index: x.num_experts for x in loop.model.layers if x.num_experts}
    names = {index: f"layers.{index}.router.experts" for index in counts}

    def of_round(params: Any, state: DecodeState) -> tuple[Tokens, Lengths]:
        target = merge(graph, params["target"])
        proposal, _ = loop.drafter.propose(params["draft"], state.draft, target, state)
        tokens = jnp.concatenate([state.tokens[:, None], proposal.tokens], axis=1)
        return tokens, jnp.where(state.is_active, 1 + proposal.num, 0)

    @jax.jit
    def count(params: Any, state: DecodeState, rows: tuple[Tokens, Lengths] | None):
        tokens, num_valid = of_round(params, state) if rows is None else rows
        taps = _EverySlot(frozenset(names.values()))
        model = merge(graph, params["target"])
        model(tokens, state.bank, num_valid, options=loop.options.compute, taps=taps)
        read = [
            (jnp.bincount(taps.found[names[index]].reshape(-1), length=num + 1)[:num] > 0).sum()
            for index, num in counts.items()
        ]
        return jnp.stack(read).mean()

    return count
