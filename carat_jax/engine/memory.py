"""What an engine holds on its device: made here, and counted here before anything is made.

Weights are counted from their declarations and the state from the shapes of its own leaves, so both
are exact; what the compiled steps need besides, for a moment, is an estimate from above (`Passes`).
An engine that does not fit is refused with the numbers and never shrunk.
"""

import dataclasses
import functools
import gc
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from carat_jax.cache import bank as banks
from carat_jax.config import Config
from carat_jax.decoding.state import DecodeState, empty_state
from carat_jax.engine.drafting import Drafting
from carat_jax.engine.prefixes import Reuse
from carat_jax.engine.shapes import compute_options, max_context, ring_rows, size_text, verify_rows
from carat_jax.engine.workspace import Passes
from carat_jax.families import ModelConfig
from carat_jax.model.params import num_bytes
from carat_jax.numerics.options import ComputeOptions


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """An engine before it exists.

    Attributes:
      config: all settings.
      model: the target's facts.
      specs: the declarations of its parameters.
      drafting: the drafter, loaded or not.
      backend: "gpu" or "cpu", where it is to run.
    """

    config: Config
    model: ModelConfig
    specs: Mapping[str, Any]
    drafting: Drafting
    backend: str

    @property
    def max_batch(self) -> int:
        """Slots."""
        return self.config.engine.max_batch

    @property
    def max_context(self) -> int:
        """Positions of a slot."""
        return max_context(self.config, self.model)

    def sized(self, max_batch: int | None = None, max_context: int | None = None) -> "Blueprint":
        """The same engine with other sizes."""
        sizes = {
            "max_batch": max_batch or self.max_batch,
            "max_context": max_context or self.max_context,
        }
        engine = dataclasses.replace(self.config.engine, **sizes)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, engine=engine))

    @functools.cached_property
    def options(self) -> ComputeOptions:
        """Which implementations run there."""
        return compute_options(self.config, self.backend)

    def memory(self) -> "Memory":
        """What it takes.

        Raises:
          ValueError: this model has no such caches.
        """
        state = jax.eval_shape(
            lambda: new_state(self.config, self.model, self.drafting, self.options)
        )
        caches = {True: 0, False: 0}
        for index, cache in state.bank.layers.items():
            caches[self.model.layer(index).is_sliding] += _size(cache)
        draft, all_caches = _size(state.draft), sum(caches.values())
        return Memory(
            num_slots=self.max_batch,
            weights=num_bytes(self.specs),
            draft_weights=num_bytes(self.drafting.specs),
            local_caches=caches[True],
            global_caches=caches[False],
            draft_caches=draft,
            slots=_size(state) - all_caches - draft,
            workspace=self._workspace(caches[True], all_caches, draft),
        )

    def _workspace(self, local: int, caches: int, draft: int) -> int:
        passes = Passes(
            config=self.config,
            models=(self.model, *filter(None, (self.drafting.model,))),
            max_context=self.max_context,
            num_rows=verify_rows(self.config, self.drafting.drafter.num_drafts),
            options=self.options,
            backend=self.backend,
        )
        has_rings = self.config.cache.local_layers != "full"
        return passes.workspace(
            rings=local * has_rings + draft,
            weights=num_bytes(self.specs) + num_bytes(self.drafting.specs),
            caches=caches + draft,
        )

    def largest_context(self, limit: int) -> int:
        """The most positions a slot can have at this batch; 0 if not even one fits."""
        most = self.model.max_position_embeddings
        return _largest(most, lambda n: self.sized(max_context=n).memory().total <= limit)

    def largest_batch(self, limit: int, most: int = 4096) -> int:
        """The most slots of this context; 0 if not even one fits."""
        return _largest(most, lambda n: self.sized(max_batch=n).memory().total <= limit)

    def check_fits(self, limit: int | None, held: int = 0) -> None:
        """Refuses what a device cannot hold; a limit of None is not known and refuses nothing.

        Args:
          limit: bytes free for this engine.
          held: bytes of its weights that are on the device already.

        Raises:
          ValueError: too little memory, with the numbers and the sizes that would fit.
        """
        memory = self.memory()
        if limit is None or memory.total - held <= limit:
            return
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in memory.parts().items())
        limit += held
        context, batch = self.largest_context(limit), self.largest_batch(limit)
        ways = [f"engine.max_context={context}"] * bool(context)
        ways += [f"engine.max_batch={batch}"] * bool(batch)
        more = ""
        if self.backend == "gpu":  # of which JAX takes three quarters unless it is told otherwise
            more = "; XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 gives JAX more of the device"
        elif self.backend == "cpu" and self.config.dtype == "bfloat16":
            more = "; a CPU widens bfloat16 weights, dtype=float32 leaves them"
        raise ValueError(
            f"engine: {self.max_batch} x {self.max_context} positions need "
            f"{size_text(memory.total)} ({parts}), the device has {size_text(limit)} left; "
            + (f"what fits: {' or '.join(ways)}" if ways else "not even one position fits")
            + more
        )


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of an engine on its device, by part.

    Attributes:
      num_slots: what all but weights and workspace is divided by for a slot's share.
      weights, draft_weights: parameters of the target and of the drafter.
      local_caches, global_caches: keys and values of the target's layers.
      draft_caches: those of a drafter that is a model.
      slots: ids, last states and sampling parameters; most of it a bias for each token.
      workspace: of the step that needs most, estimated from above.
    """

    num_slots: int
    weights: int
    draft_weights: int
    local_caches: int
    global_caches: int
    draft_caches: int
    slots: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes of every part that takes any, by name."""
        named = {
            "weights": self.weights,
            "drafter": self.draft_weights,
            "local caches": self.local_caches,
            "global caches": self.global_caches,
            "drafter's caches": self.draft_caches,
            "slots": self.slots,
            "workspace": self.workspace,
        }
        return {name: size for name, size in named.items() if size}

    def a_slot(self) -> dict[str, int]:
        """Bytes that each slot takes of every part that grows with their number."""
        shared = ("weights", "drafter", "workspace")
        parts = self.parts().items()
        return {name: size // self.num_slots for name, size in parts if name not in shared}


def new_state(
    config: Config, model: ModelConfig, drafting: Drafting, options: ComputeOptions
) -> DecodeState:
    """The state of an engine that serves nobody yet.

    Raises:
      ValueError: `cache.global_layers` needs a model of another kind.
    """
    dtype, positions = jnp.dtype(config.dtype), max_context(config, model)
    sizes = (
        config.engine.max_batch,
        positions,
        ring_rows(config, drafting.drafter.num_drafts),
        dtype,
    )
    local, whole = config.cache.local_layers, config.cache.global_layers
    bank = banks.empty_bank(model, *sizes, banks.CacheKinds(local, whole, block=options.ring_block))
    draft = ()
    if drafting.model is not None:
        draft = banks.empty_bank(drafting.model, *sizes, banks.CacheKinds(block=options.ring_block))
    return empty_state(bank, model, positions, dtype, draft)


def reuse_of(state: DecodeState) -> Reuse:
    """How far slots can be cut back: what the caches of target and drafter both allow."""
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, banks.CacheBank))
    found = [leaf for leaf in leaves if isinstance(leaf, banks.CacheBank)]
    return Reuse(
        max_rollback=min(bank.max_rollback for bank in found),
        capacity=min(cache.capacity for bank in found for cache in bank.layers.values()),
    )


def device_limit() -> int | None:
    """Bytes that JAX can still take on the first device; None where the device does not say.

    Of a CPU it is the machine's memory, whoever else uses it.
    """
    gc.collect()  # an engine that nobody holds any more may still wait for it
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n from 0 to `most` that fits, where less fits whenever more does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
