"""Toy models on the engine's side: parameters placed by their declaration, steps, and a bank.

The placement here is written a second time on purpose, apart from the loader's: these tests judge
the model and must not depend on files.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.cache.bank import PLAIN as RINGS
from carat_jax.cache.bank import CacheBank, CacheKinds, empty_bank
from carat_jax.decoding.drafters import NoDrafter
from carat_jax.decoding.state import DecodeState, empty_state
from carat_jax.decoding.steps import StepOptions, Steps, build_steps
from carat_jax.families import ModelConfig, from_hf
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import ParamSpec, split
from carat_jax.numerics.options import PLAIN, ComputeOptions
from tests.oracle import Reference
from tests.toys import CONFIGS, make_weights

MAX_ROWS = 5  # a verify step of four drafts


def place_all(specs, weights) -> dict:
    """The parameter tree for `specs`, with every tensor of `weights` used exactly once."""
    used = []
    params = _place(specs, weights, used)
    assert sorted(used) == sorted(weights)
    return params


def _place(specs, weights, used: list[str]):
    if not isinstance(specs, ParamSpec):
        return {key: _place(node, weights, used) for key, node in specs.items()}
    out = np.full(specs.shape, np.nan, specs.dtype)
    for source in specs.tensors:
        tensor = weights[source.name]
        assert tensor.shape == source.shape, source.name
        tensor = tensor.reshape(source.view or tensor.shape)
        out[source.index or ...] = tensor.transpose(source.order or range(tensor.ndim))
        used.append(source.name)
    assert not np.isnan(out).any(), specs
    return jnp.asarray(out)


@dataclasses.dataclass(frozen=True)
class Toy:
    """One toy: its config in both readings, its parameters, its steps, and the reference."""

    raw: dict
    config: ModelConfig
    params: dict
    steps: Steps
    reference: Reference
    dtype: jnp.dtype

    def bank(
        self, num_slots: int = 3, max_context: int = 96, kinds: CacheKinds = RINGS
    ) -> CacheBank:
        """An empty bank."""
        return empty_bank(self.config, num_slots, max_context, MAX_ROWS, self.dtype, kinds)

    def state(self, num_slots: int = 3, max_context: int = 96) -> DecodeState:
        """A decode state over an empty bank."""
        bank = self.bank(num_slots, max_context)
        return empty_state(bank, self.config, max_context, self.dtype)

    def feed(
        self, bank: CacheBank, sequences, chunk: int, num_keys: int | None = None
    ) -> tuple[CacheBank, list[np.ndarray]]:
        """Feeds one sequence to each slot in chunks of `chunk` rows; all rows' logits per slot."""
        logits = [[] for _ in sequences]
        for first in range(0, max(map(len, sequences)), chunk):
            parts = [list(ids[first : first + chunk]) for ids in sequences]
            tokens = np.array([part + [7] * (chunk - len(part)) for part in parts], np.int32)
            num_valid = np.array([len(part) for part in parts], np.int32)
            bank, _, out = self.steps.verify(self.params, bank, tokens, num_valid, num_keys)
            for row, part in enumerate(parts):
                logits[row].append(np.asarray(out[row, : len(part)]))
        nothing = np.zeros((0, self.config.vocab_size), np.float32)
        return bank, [np.concatenate([nothing, *rows]) for rows in logits]

    def reweighted(self, weights: dict) -> "Toy":
        """The same compiled steps with other weights."""
        params = {"target": place_all(split(Gemma4(self.config, self.dtype))[1], weights)}
        params["draft"] = ()
        return dataclasses.replace(self, params=params, reference=Reference(self.raw, weights))


def build(
    raw: dict, weights: dict | None = None, dtype=jnp.float32, compute: ComputeOptions = PLAIN
) -> Toy:
    """A toy from a flat text config; every tensor must be used exactly once."""
    config, dtype = from_hf(raw), jnp.dtype(dtype)
    weights = make_weights(raw) if weights is None else weights
    graph, specs = split(Gemma4(config, dtype))
    options = StepOptions(compute, num_top=3)
    steps = build_steps(graph, NoDrafter(), options, base_bias=jnp.zeros(config.vocab_size))
    params = {"target": place_all(specs, weights), "draft": ()}
    reference = Reference(raw, weights)
    return Toy(raw, config, params, steps, reference, jnp.dtype(dtype))


@functools.cache
def toy(name: str) -> Toy:
    """The float32 toy of that name, built once per process."""
    return build(CONFIGS[name])


def poison(bank: CacheBank, value: float) -> CacheBank:
    """The bank with every entry that no position occupies set to `value`."""
    lengths = np.asarray(bank.lengths)

    def fill(rows: jax.Array) -> jax.Array:
        rows = np.array(rows)
        for slot, length in enumerate(lengths):
            rows[slot, :, length:] = value  # a ring has filled up once length >= capacity
        return jnp.asarray(rows)

    return dataclasses.replace(bank, layers=jax.tree.map(fill, bank.layers))
