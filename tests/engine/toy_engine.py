"""Engines over a random toy model that speaks the small tokenizer of `gemma_like`.

The toy's weights are those of `toys`, except that the final norm flips the sign of half of its
channels: with a tied head a random model would otherwise repeat its last token for ever.

`scripted_hook` makes an engine say given tokens: at the positions of `LINES` it leaves one token.
A prompt as long as a line's start has that line for an answer.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from carat_jax.config import read_settings
from carat_jax.decoding.drafters import NoDrafter
from carat_jax.engine.api import Engine, Opened
from carat_jax.engine.drafting import Drafting
from carat_jax.engine.request import Result
from carat_jax.engine.tokenizer import Tokenizer
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import split
from tests.engine.gemma_like import write_folder
from tests.oracle import log_softmax, top2_gap
from tests.toy_model import Toy, build
from tests.toys import CONFIGS, make_weights

CONTEXT = 96
BOS = 2
SUPPRESSED = (300, 301)


@functools.cache
def tokenizer() -> Tokenizer:
    """The tokenizer, of a checkpoint that suppresses two tokens."""
    generation = {"suppress_tokens": list(SUPPRESSED), "eos_token_id": 1}
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_folder(
            write_folder(Path(folder) / "toy", generation_config=generation)
        )


@functools.cache
def toy(name: str = "T4", num_layers: int = 3, **changed: int) -> Toy:
    """A few layers, the last one global, a window of eight, a context of 96."""
    raw = {
        **CONFIGS[name],
        **changed,
        "vocab_size": tokenizer().vocab_size,
        "num_hidden_layers": num_layers,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * (num_layers - 1) + ["full_attention"],
    }
    weights = make_weights(raw, seed=1)
    flips = np.random.default_rng(1).choice([-1, 1], raw["hidden_size"]).astype(np.float32)
    weights["norm.weight"] *= flips
    for name in weights:
        if ".post_" in name:
            weights[name] = weights[name] * 3
    return build(raw, weights)


def make_engine(hook=None, **settings) -> Engine:
    """A float32 engine of the toy; keywords are settings of the section `engine`."""
    model = toy()
    graph, _ = split(Gemma4(model.config, model.dtype))
    sections = {"sampling": {"max_tokens": 16, "temperature": 0.0}, "engine": settings}
    chosen = read_settings(keywords={"dtype": "float32", **sections})
    opened = Opened(Path(), model.config, graph, model.params["target"], tokenizer())
    return Engine(chosen, opened, Drafting(NoDrafter()), hook)


def prompt(length: int, seed: int = 0) -> list[int]:
    """BOS and random ids of plain tokens."""
    rng = np.random.default_rng([length, seed + 1])
    return [BOS, *rng.integers(310, tokenizer().vocab_size, length - 1).tolist()]


def reference_logits(ids: Sequence[int]) -> np.ndarray:
    """The reference's logits of every position, with the suppressed tokens out of the way."""
    logits = toy().reference.logits(ids)
    logits[:, list(SUPPRESSED)] = -np.inf
    return logits


def reference_logprobs(prompt_ids: Sequence[int], ids: Sequence[int], change=None) -> np.ndarray:
    """The law of each generated id, `[len(ids), V]`; `change` is applied to the logits first."""
    logits = reference_logits([*prompt_ids, *ids])[len(prompt_ids) - 1 : -1]
    return log_softmax(logits if change is None else change(logits))


def assert_greedy(result: Result, num_tokens: int) -> None:
    """The ids are the reference's greedy ones; no prompt used here comes close to a tie."""
    logits = reference_logits([*result.prompt_ids, *result.ids])[len(result.prompt_ids) - 1 : -1]
    assert top2_gap(logits).min() > 1e-3
    assert result.ids == tuple(logits.argmax(axis=-1))
    assert len(result.ids) == num_tokens


# What the scripted engine says; each line ends with an id that ends an answer.
MESSAGES = [{"role": "user", "content": "hi"}]
LINES = {
    "chat": "<|channel>,thought,\n,h,<channel|>,in,<turn|>".split(","),
    "abcd": "xa b cd <eos>".split(),
    "abe": "xa b e <eos>".split(),
    "emoji": "<0xF0> <0x9F> <0x98> <0x80> 日本 <0xFF> h <turn|>".split(),
    "space": "▁the ▁▁ ▁a <|tool_response>".split(),
}
# From here on it is the model that speaks, from HALVED on with half its logits, then it is broken.
FREE, HALVED, BROKEN = 60, 80, 90


@functools.cache
def starts() -> dict[str, int]:
    """The position each line starts at: the chat line after its messages, the others in a row."""
    found, at = {}, len(tokenizer().encode_chat(MESSAGES))
    for name, tokens in LINES.items():
        found[name], at = at, at + len(tokens)
    assert at <= FREE
    return found


def line_ids(name: str) -> list[int]:
    """The ids of a line."""
    return [tokenizer().token_id(token) for token in LINES[name]]


def scripted_hook(logits, positions):
    """The hook of the scripted engine."""
    forced = np.full(CONTEXT + 1, -1)
    for name, start in starts().items():
        forced[start : start + len(LINES[name])] = line_ids(name)
    token = jnp.asarray(forced)[positions][:, None]
    positions = positions[:, None]
    logits = jnp.where(positions >= HALVED, logits / 2, logits)
    logits = jnp.where(positions >= BROKEN, jnp.nan, logits)
    return jnp.where((token < 0) | (jnp.arange(logits.shape[-1]) == token), logits, -jnp.inf)
