"""Captures arrays inside the model for one prompt, in an executable of its own.

The prompt is one prefill chunk over caches made for it, so the engine's steps, their executables
and what is being served are left as they are.
"""

import dataclasses
import difflib
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from carat_jax.cache.bank import CacheKinds, empty_bank
from carat_jax.config import Config
from carat_jax.engine.chunks import padded_row
from carat_jax.engine.shapes import compute_options, size_text
from carat_jax.families import ModelConfig
from carat_jax.model.params import merge
from carat_jax.model.taps import Taps, tap_names

# Rows are rounded up to a multiple of this, to compile less often.
_ROUND_UP = 64
# Captured bytes of one trace, at most: they are on the device all at once.
_MOST_BYTES = 8 * 2**30
# The layers and the part of a name or a pattern such as `layers.*.attn.q`.
_IN_LAYER = re.compile(r"layers\.([^.]+)\.(.+)")


def matching_names(capture: str | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The known names that some pattern of `capture` matches (`*` is any text), in their order.

    Raises:
      ValueError: a pattern matches nothing; the nearest names, or the layers there are, are given.
    """
    listed = capture if isinstance(capture, Iterable) else ()
    patterns = [capture] if isinstance(capture, str) else list(listed)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"trace: capture: {capture!r} is not a name or a list of names")
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"trace: there is no array {pattern!r}; {_hint(pattern, known)}")
    return tuple(name for name in known if any(fnmatch.fnmatchcase(name, p) for p in patterns))


def _hint(pattern: str, known: Sequence[str]) -> str:
    """What to write instead: the nearest names, each for the layers that `pattern` asks for."""
    in_layers = [match.groups() for match in map(_IN_LAYER.fullmatch, known) if match]
    if asked := _IN_LAYER.fullmatch(pattern):
        which, wanted = asked.groups()
        parts = [part for index, part in in_layers if fnmatch.fnmatchcase(index, which)]
        if not parts:
            return f"layers are 0 to {max(int(index) for index, _ in in_layers)}"
        near = difflib.get_close_matches(wanted, dict.fromkeys(parts), n=3, cutoff=0.4)
        near = [f"layers.{which}.{part}" for part in near]
    else:
        # A pattern is about several layers, and so is what it may have meant.
        spelt = [_IN_LAYER.sub(r"layers.*.\2", name) for name in known]
        names = dict.fromkeys(spelt if set(pattern) & set("*?[") else known)
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    return f"the nearest are {', '.join(near)}" if near else "see trace_names()"


class Tracer:
    """Compiles and runs traces of one model.

    Args:
      config: all settings: caches and attention are those of the engine.
      model: its facts.
      graph: the model without arrays.
    """

    def __init__(self, config: Config, model: ModelConfig, graph: nnx.GraphDef):
        self._model, self._graph, self._dtype = model, graph, jnp.dtype(config.dtype)
        self._options = options = dataclasses.replace(compute_options(config), fuse_rows=False)
        cache = config.cache
        self._kinds = CacheKinds(cache.local_layers, cache.global_layers, options.ring_block)
        self._compiled: dict[frozenset[str], Callable] = {}
        self.names = tap_names(model)

    def run(self, params: Any, ids: Sequence[int], names: Sequence[str]) -> dict[str, np.ndarray]:
        """The named arrays of a forward over `ids`: rows first, scores `[N, T, T]`.

        Numbers are float32, ids of experts int32.

        Raises:
          ValueError: they would take more memory than a trace may.
        """
        wanted, length = frozenset(names), len(ids)
        step = self._compiled.setdefault(wanted, jax.jit(self._step(wanted)))
        row, num_valid = padded_row(ids, -(-length // _ROUND_UP) * _ROUND_UP)
        self._check_size(jax.eval_shape(step, params, row, num_valid), length)
        found = jax.device_get(step(params, row, num_valid))
        return {name: _cut(name, found[name], length) for name in names}

    def _step(self, wanted: frozenset[str]) -> Callable[..., dict[str, jax.Array]]:
        # The logit lens is read off the residual stream.
        lenses = [n for n in wanted if n.startswith("layers.") and n.endswith(".logits")]
        streams = {name: name.removesuffix("logits") + "residual" for name in lenses}

        def step(params: Any, tokens: jax.Array, num_valid: jax.Array) -> dict[str, jax.Array]:
            model, taps = merge(self._graph, params), Taps(wanted | set(streams.values()))
            bank = empty_bank(self._model, 1, tokens.shape[1], 1, self._dtype, self._kinds)
            options = {"options": self._options, "taps": taps}
            hidden, _ = model(tokens, bank, num_valid, **options)
            found = dict(taps.found)
            for name, stream in streams.items():
                found[name] = model.logits(model.norm(taps.found[stream]))
            if "logits" in wanted:
                found["logits"] = model.logits(hidden[0])
            return {name: _widened(found[name]) for name in wanted}

        return step

    def _check_size(self, shapes: Mapping[str, jax.ShapeDtypeStruct], length: int) -> None:
        sizes = {name: 4 * math.prod(leaf.shape) for name, leaf in shapes.items()}
        total, largest = sum(sizes.values()), max(sizes, key=sizes.get)
        if total > _MOST_BYTES:
            raise ValueError(
                f"trace: {len(sizes)} arrays of {length} tokens take {size_text(total)}, the most "
                f"is {size_text(_MOST_BYTES)}; capture fewer (the largest is {largest} with "
                f"{size_text(sizes[largest])}) or give a shorter prompt"
            )


def _widened(found: jax.Array) -> jax.Array:
    """Ids as they are, numbers in float32."""
    return found if jnp.issubdtype(found.dtype, jnp.integer) else found.astype(jnp.float32)


def _cut(name: str, found: np.ndarray, length: int) -> np.ndarray:
    """The rows of real tokens."""
    is_square = name.endswith((".scores", ".probs"))
    return found[:, :length, :length] if is_square else found[:length]
