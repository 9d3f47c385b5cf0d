"""The engine's own executables over full caches, to be called over and over and timed.

What is measured is what serves: the steps are lowered from an engine with that engine's parameters
and state. Caches are filled with random rows up to a context, so that no prompt has to be run.
"""

import concurrent.futures
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.decoding.steps import SamplerKind
from carat_jax.engine.api import Engine
from carat_jax.engine.engine import EngineLoop
from carat_jax.numerics.options import compiler_options

_GREEDY = SamplerKind(draws=False, logprobs=False)
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
# Positions that timed steps may add to a slot.
ROOM = 2048


class DeviceStep:
    """One executable of an engine with its state.

    Attributes:
      loop: the engine's loop, whose state every call consumes and replaces.
      rows: tokens `[B, T]` and how many are real, `[B]`, of a pass that is always the same; None
        of one that goes on from its own tokens.
      compiled: the executable, once `compile_all` has made it.
    """

    def __init__(
        self,
        loop: EngineLoop,
        lowered: Any,
        call: Callable[[Any], Any],
        options: Mapping[str, str] | None = None,
        rows: tuple[np.ndarray, np.ndarray] | None = None,
        rounds: int = 1,
    ):
        self.loop, self.compiled, self.rows, self._rounds = loop, None, rows, rounds
        self._lowered, self._call, self._options = lowered, call, options

    def compile(self) -> None:
        """Makes the executable."""
        self.compiled = self._lowered.compile(self._options)

    def without_graphs(self) -> "DeviceStep":
        """The same step, to be compiled so that its kernels are launched one by one.

        Of kernels in a CUDA graph a profiler does not tell which instruction they came from.
        """
        options = {**compiler_options(), **_NO_GRAPHS} if jax.default_backend() == "gpu" else None
        return DeviceStep(self.loop, self._lowered, self._call, options, self.rows, self._rounds)

    @property
    def temp_bytes(self) -> int:
        """Device memory of its temporaries; a cache that is copied shows here."""
        return self.compiled.memory_analysis().temp_size_in_bytes

    def queue(self, count: int) -> float:
        """Seconds a round or pass of `count` queued calls, the clock read once after the last."""
        start = time.perf_counter()
        for _ in range(count):
            out = self._call(self.compiled)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / (count * self._rounds)


class SeveralSteps(DeviceStep):
    """A round that is several executables one after the other, as with `decode.uniform_rows`."""

    def compile(self) -> None:
        """Compiles the largest, which tells what they take, and the others by a first round."""
        super().compile()
        jax.block_until_ready(self._call(self.compiled))


def with_room(base: Engine, context: int, room: int = ROOM) -> int:
    """Positions of slots that hold `context` and get up to `room` more.

    Raises:
      ValueError: the model was not made for as many.
    """
    if context + room > (limit := base.model.max_position_embeddings):
        raise ValueError(
            f"--context: {context} positions and room for {room} more are above the model's own "
            f"limit of {limit}"
        )
    return context + room


def filled(engine: Engine, context: int) -> EngineLoop:
    """The engine's loop with `context` random cached positions in every slot, all decoding."""
    loop = engine.loop
    state, key = loop._state, jax.random.key(0)
    leaves, tree = jax.tree.flatten(state.bank.layers)

    @jax.jit(donate_argnums=0)
    def noise(leaf: jax.Array, key: jax.Array) -> jax.Array:
        is_table = jnp.issubdtype(leaf.dtype, jnp.integer)
        return leaf if is_table else jax.random.normal(key, leaf.shape, leaf.dtype) * 0.5

    layers = [noise(leaf, jax.random.fold_in(key, i)) for i, leaf in enumerate(leaves)]
    lengths = jnp.full(loop.num_slots, context, jnp.int32)
    bank = dataclasses.replace(state.bank, layers=jax.tree.unflatten(tree, layers), lengths=lengths)
    loop._state = dataclasses.replace(state, bank=bank, is_active=jnp.ones(loop.num_slots, bool))
    return loop


def forget(loop: EngineLoop) -> None:
    """Drops the loop's caches; it makes empty ones when it next serves."""
    loop._state = None


def whole_round(loop: EngineLoop) -> DeviceStep:
    """A round of the engine: draft, verify, accept; plain decoding without a drafter."""
    if rows := loop.options.uniform_rows:

        def several(_: Any) -> Any:
            loop._state, drawn = loop._steps.round(loop._params, loop._state, _GREEDY)
            return drawn

        return SeveralSteps(loop, verify(loop, rows)._lowered, several)
    lowered = loop._steps.round.lower(loop._params, loop._state, _GREEDY, None)

    def call(compiled: Any) -> Any:
        loop._state, drawn = compiled(loop._params, loop._state)
        return drawn

    return DeviceStep(loop, lowered, call, rounds=loop.options.rounds_per_call)


def verify(loop: EngineLoop, num_rows: int) -> DeviceStep:
    """The target's pass over `num_rows` rows of every slot, alone."""
    tokens = _some_tokens(loop, loop.num_slots, num_rows)
    num_valid = np.full(loop.num_slots, num_rows, np.int32)
    lowered = loop._steps.verify.lower(loop._params, loop._state.bank, tokens, num_valid)

    def call(compiled: Any) -> Any:
        bank, hidden, _ = compiled(loop._params, loop._state.bank, tokens, num_valid)
        loop._state = dataclasses.replace(loop._state, bank=bank)
        return hidden

    return DeviceStep(loop, lowered, call, rows=(tokens, num_valid))


def prefill(loop: EngineLoop, size: int) -> DeviceStep:
    """A chunk of `size` positions of slot 0, always on top of the same cached positions."""
    tokens, num_valid = _some_tokens(loop, 1, size), np.full(1, size, np.int32)
    slot, lengths = np.zeros(1, np.int32), np.asarray(loop._state.bank.lengths)
    lowered = loop._steps.prefill.lower(loop._params, loop._state, tokens, num_valid, slot)

    def call(compiled: Any) -> Any:
        bank = dataclasses.replace(loop._state.bank, lengths=jnp.asarray(lengths))
        state = dataclasses.replace(loop._state, bank=bank)
        loop._state, logits = compiled(loop._params, state, tokens, num_valid, slot)
        return logits

    return DeviceStep(loop, lowered, call)


def _some_tokens(loop: EngineLoop, *shape: int) -> np.ndarray:
    """Ids drawn at random: a mixture would send equal ones to the same experts."""
    return np.random.default_rng(0).integers(loop.model.vocab_size, size=shape, dtype=np.int32)


def compile_all(steps: Mapping[str, DeviceStep]) -> float:
    """Compiles the steps side by side and calls each a few times; seconds of compiling."""
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(DeviceStep.compile, steps.values()))
    elapsed = time.perf_counter() - started
    for step in steps.values():
        step.queue(3)
    return elapsed


def alternate(
    steps: Mapping[str, DeviceStep], count: int, rounds: int = 5
) -> dict[str, list[float]]:
    """Seconds of each step, as `queue` has them, by turn; the steps take turns, A B A B."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _, (name, step) in itertools.product(range(rounds), steps.items()):
        times[name].append(step.queue(count))
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each list."""
    return {name: statistics.median(values) for name, values in times.items()}
