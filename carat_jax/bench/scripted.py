"""A drafter that is told the answers, so that every pattern of acceptance is reached at will.

It knows whole texts. In each round it finds the text that a slot's ids begin, and proposes the next
tokens of it: so many right ones as its script says for that position, then wrong ones.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from carat_jax.decoding.drafters import Proposal, Stateless
from carat_jax.decoding.state import DecodeState
from carat_jax.model.gemma4 import Gemma4


@dataclasses.dataclass(frozen=True)
class ScriptDrafter(Stateless):
    """See the module's docstring; its parameters come from `script`."""

    num_drafts: int
    name: str = "script"

    def propose(
        self, params: Any, own: Any, target: Gemma4, state: DecodeState
    ) -> tuple[Proposal, Any]:
        """M tokens for every slot whose ids begin a known text."""
        texts, ends, right = params["texts"], params["ends"], params["right"]
        width = texts.shape[1]
        known = state.bank.lengths + 1
        is_known = jnp.arange(width) < known[:, None]
        agrees = (state.ids[:, None, :width] == texts) | ~is_known[:, None]
        begins = jnp.all(agrees, axis=-1) & (known[:, None] < ends)
        place = known[:, None] + jnp.arange(self.num_drafts)
        told = texts[jnp.argmax(begins, axis=1)[:, None], jnp.minimum(place, width - 1)]
        is_right = jnp.arange(self.num_drafts) < right[jnp.minimum(known, width - 1)][:, None]
        wrong = (told + 1) % target.config.vocab_size
        num = jnp.where(jnp.any(begins, axis=1), self.num_drafts, 0)
        return Proposal(jnp.where(is_right, told, wrong), num), own


def script(texts: Sequence[Sequence[int]], num_drafts: int, seed: int = 0) -> dict[str, Any]:
    """Parameters of a `ScriptDrafter`: the texts, and 0 to M right tokens at each position."""
    ends = np.array([len(text) for text in texts], np.int32)
    table = np.zeros((len(texts), max(ends)), np.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    right = np.random.default_rng(seed).integers(0, num_drafts + 1, table.shape[1])
    arrays = {"texts": table, "ends": ends, "right": right.astype(np.int32)}
    return {name: jnp.asarray(array) for name, array in arrays.items()}
