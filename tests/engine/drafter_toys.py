"""Every drafter on the toy of `toy_engine`, and loops that run it.

The script drafter is told the answers and gets right as many tokens as it is told to. The assistant
is random, so its drafts hardly ever stand. The draft model is the toy with a little noise on its
weights, so that about half of its drafts do.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np

from carat_jax.assistant_families import assistant_from_hf
from carat_jax.config import SamplingParams, read_settings
from carat_jax.decoding.drafters import (
    AssistantDrafter,
    CombinedDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    Proposal,
    shortened,
    sources,
)
from carat_jax.engine import engine as engine_module
from carat_jax.engine.draft_length import DraftLength
from carat_jax.engine.drafting import Drafting
from carat_jax.engine.engine import EngineLoop
from carat_jax.model.assistant import Assistant
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import split
from carat_jax.numerics.options import PLAIN
from tests.assistant_oracle import ReferenceAssistant
from tests.assistant_pair import place
from tests.assistant_toys import assistant_config, assistant_weights
from tests.engine.toy_engine import CONTEXT, prompt, tokenizer, toy
from tests.oracle import Reference
from tests.toy_model import place_all

W = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class ScriptDrafter:
    """Proposes what the script says follows: `right[p]` true tokens after position p, then others.

    Its parameters are `truth`, ids by slot and position, and `right`.
    """

    num_drafts: int
    name: str = "script"

    def propose(self, params: Any, own: Any, target: Any, state: Any) -> tuple[Proposal, Any]:
        """M tokens for every slot."""
        truth, right = params
        place = state.bank.lengths[:, None] + 1 + jnp.arange(self.num_drafts)
        told = jnp.take_along_axis(truth, jnp.minimum(place, truth.shape[1] - 1), axis=1)
        wrong = (told + 1) % 300
        is_right = jnp.arange(self.num_drafts) < right[state.bank.lengths][:, None]
        num = jnp.full(state.tokens.shape, self.num_drafts)
        return Proposal(jnp.where(is_right, told, wrong), num), own

    def commit(self, own: Any, lengths: Any) -> Any:
        """Nothing is kept."""
        return own

    def prefill(self, params: Any, own: Any, tokens: Any, num_valid: Any, slot: Any) -> Any:
        """Nothing is kept."""
        return own


def empty_script(num_slots: int):
    """Parameters of a script drafter that knows nothing yet."""
    return (
        jnp.zeros((num_slots, CONTEXT + 16), jnp.int32),
        jnp.zeros(CONTEXT + 16, jnp.int32),
    )


def set_script(engine: EngineLoop, texts, right) -> None:
    """What the drafter knows: whole texts by slot, and how many right tokens at each position."""
    truth, pattern = (np.array(x) for x in empty_script(engine.num_slots))
    for slot, text in enumerate(texts):
        truth[slot, : len(text)] = text
    pattern[:] = np.resize(right, pattern.shape)
    told = (jnp.asarray(truth), jnp.asarray(pattern))
    draft = engine._params["draft"]
    engine._params["draft"] = draft | {"inner": told} if isinstance(draft, dict) else told


@functools.cache
def assistant_reference() -> ReferenceAssistant:
    """The numpy drafter that the toy's assistant must agree with: a local and a global layer."""
    kinds = ["sliding_attention", "full_attention"]
    raw = assistant_config(toy().raw, layer_types=kinds)
    return ReferenceAssistant(raw, assistant_weights(raw), toy().reference)


@functools.cache
def draft_model_reference() -> Reference:
    """The draft model in numpy: the toy's weights and a little noise."""
    rng = np.random.default_rng(3)
    weights = {
        name: (tensor * (1 + 0.05 * rng.normal(size=tensor.shape))).astype(np.float32)
        for name, tensor in toy().reference.weights.items()
    }
    return Reference(toy().raw, weights)


@functools.cache
def _assistant():
    reference, model = assistant_reference(), toy()
    config = assistant_from_hf(reference.facts)
    graph, specs = split(Assistant(config, model.config, model.dtype))
    weights = assistant_weights(reference.facts)
    return graph, place(specs, weights)


@functools.cache
def drafting(name: str, num_drafts: int, num_slots: int = 1, **choices: Any) -> Drafting:
    """A drafter with its weights; `choices` are `samples` and `hook`."""
    model = toy()
    if name == "none":
        return Drafting(NoDrafter())
    if name == "script":
        return Drafting(ScriptDrafter(num_drafts), empty_script(num_slots))
    if name == "ngram":
        return Drafting(NgramDrafter(num_drafts, shortest=1))
    if name == "model":
        graph, specs = split(Gemma4(model.config, model.dtype))
        weights = {n: t.astype(np.float32) for n, t in draft_model_reference().weights.items()}
        drafter = ModelDrafter(graph, num_drafts, PLAIN, **choices)
        return Drafting(drafter, place_all(specs, weights), model=model.config)
    graph, params = _assistant()
    assistant = AssistantDrafter(graph, num_drafts, PLAIN, **choices)
    if name == "combined":
        ngram = NgramDrafter(num_drafts, shortest=1)
        return Drafting(CombinedDrafter(ngram, assistant), params)
    return Drafting(assistant, params)


@functools.cache
def loop(
    name: str, num_drafts: int = 0, num_slots: int = 1, *, hook=None, samples=False, **settings
) -> EngineLoop:
    """An engine of the toy with a drafter; made once for all tests. Settings by dotted name."""
    choices = {"samples": samples, "hook": hook} if samples or hook else {}
    made = drafting(name, num_drafts, num_slots, **(choices if num_drafts else {}))
    return make_loop(made, num_slots, hook, **settings)


def make_loop(made: Drafting, num_slots: int, hook, **settings) -> EngineLoop:
    """An engine of the toy; a draft length in its settings only says whether it is chosen."""
    model = toy()
    graph, _ = split(Gemma4(model.config, model.dtype))
    engine = {"max_batch": num_slots, "prefill_chunks": [9], "max_context": CONTEXT}
    chosen = {"dtype": "float32", "engine": engine}
    chosen |= {key.replace("__", "."): value for key, value in settings.items()}
    return EngineLoop(
        read_settings(keywords=chosen).build(), model.config, graph, model.params["target"],
        tokenizer(), hook=hook, drafting=made,
    )  # fmt: skip


class Lengths(DraftLength):
    """In the place of a chosen draft length: these lengths in turn, whatever they cost."""

    def __init__(self, lengths: Sequence[int]):
        super().__init__((max(lengths),))
        self._turn = itertools.cycle(lengths)

    def choose(self, most: int) -> int:
        """The next of them."""
        return next(self._turn)


@dataclasses.dataclass(frozen=True)
class Limited:
    """Another drafter, of whose drafts only the first `most` count; one compilation serves all."""

    inner: Any
    name: str = "limited"

    @property
    def num_drafts(self) -> int:
        """The most there are."""
        return self.inner.num_drafts

    def propose(self, params: Any, own: Any, target: Any, state: Any) -> tuple[Proposal, Any]:
        """No more than `most` a slot."""
        made, own = self.inner.propose(params["inner"], own, target, state)
        return dataclasses.replace(made, num=jnp.minimum(made.num, params["most"])), own

    def commit(self, own: Any, lengths: Any) -> Any:
        """As the other."""
        return self.inner.commit(own, lengths)

    def prefill(self, params: Any, own: Any, tokens: Any, num_valid: Any, slot: Any) -> Any:
        """As the other."""
        return self.inner.prefill(params["inner"], own, tokens, num_valid, slot)


LONGEST = W
COMPILED = (0, LONGEST)


@functools.cache
def any_length(name: str) -> EngineLoop:
    """Three slots and a drafter of `COMPILED` lengths, of whose drafts a limit may count less.

    What a drafter without a state has no part in is compiled once for all of them.
    """
    parts = {
        "CHOICES": COMPILED,
        "shortened": lambda drafter, m: Limited(shortened(drafter.inner, m)),
        "sources": lambda drafter: sources(drafter.inner),
    }
    made = drafting(name, LONGEST, 3)
    params = {"inner": made.params, "most": jnp.int32(LONGEST)}
    limited = Drafting(Limited(made.drafter), params, model=made.model)
    with mock.patch.multiple(engine_module, **parts):
        engine = make_loop(limited, 3, None, decode__draft_len="auto")
    if name not in ("script", "model"):
        own = {part: getattr(engine._steps, part) for part in ("round", "verify")}
        engine._steps = dataclasses.replace(any_length("script")._steps, **own)
    return engine


def run(engine: EngineLoop, prompts, params: SamplingParams = GREEDY):
    """One result a prompt."""
    requests = [engine.submit(ids, params) for ids in prompts]
    engine.run(requests)
    while not engine.is_idle:
        engine.step()
    return [request.result() for request in requests]


@functools.cache
def plain(length: int, params: SamplingParams = GREEDY):
    """The answer of plain decoding."""
    return run(loop("none"), [prompt(length)], params)[0]
