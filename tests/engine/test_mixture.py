"""A mixture of experts under the engine: drafts, slots, rows and implementations change no answer.

The same promises as `test_speculation` and `test_switches` make for dense models, on a toy whose
tokens take three of ten experts. In float32 no prompt used here comes near a tie, of tokens or of
experts.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from carat_jax.assistant_families import assistant_from_hf
from carat_jax.config import read_settings, sampling_from
from carat_jax.decoding.drafters import (
    AssistantDrafter,
    CombinedDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from carat_jax.engine.compile_counter import num_compilations
from carat_jax.engine.drafting import Drafting
from carat_jax.engine.engine import EngineLoop
from carat_jax.model.assistant import Assistant
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import split
from carat_jax.numerics.options import PLAIN
from tests.assistant_pair import place
from tests.assistant_toys import assistant_config, assistant_weights
from tests.engine.drafter_toys import GREEDY, ScriptDrafter, run, set_script
from tests.engine.toy_engine import CONTEXT, prompt, tokenizer
from tests.engine.toy_engine import toy as named_toy

LENGTHS = (2, 9, 20)
# Heads of widths that the attention kernels take.
toy = functools.partial(named_toy, "26b", 2, head_dim=32, global_head_dim=64)


def make(drafter, params=(), num_slots=3, draft_model=None, **settings) -> EngineLoop:
    """An engine of the mixture with a drafter."""
    model = toy()
    dtype = jnp.dtype(settings.setdefault("dtype", "float32"))
    graph, _ = split(Gemma4(model.config, dtype))
    engine = {"max_batch": num_slots, "prefill_chunks": [9], "max_context": CONTEXT}
    chosen = read_settings(keywords={"engine": engine, **settings}).build()
    weights = jax.tree.map(lambda x: x.astype(dtype), model.params["target"])
    drafting = Drafting(drafter, params, model=draft_model)
    return EngineLoop(chosen, model.config, graph, weights, tokenizer(), drafting=drafting)


def scripted(num_drafts, num_slots=3, **settings) -> EngineLoop:
    """An engine whose drafter will be told what to propose."""
    size = CONTEXT + 16
    script = (jnp.zeros((num_slots, size), jnp.int32), jnp.zeros(size, jnp.int32))
    return make(ScriptDrafter(num_drafts), script, num_slots, **settings)


@functools.cache
def plain() -> EngineLoop:
    """The engine whose answers the others must give."""
    return make(NoDrafter())


@functools.cache
def answers(params=GREEDY):
    """What plain decoding says to each prompt, in a batch."""
    return run(plain(), [prompt(n) for n in LENGTHS], params)


def texts():
    """Prompts with their answers."""
    return [[*prompt(n), *want.ids] for n, want in zip(LENGTHS, answers(), strict=True)]


def test_plain_greedy_ids_are_the_references():
    for length, want in zip(LENGTHS, answers(), strict=True):
        told, gap = toy().reference.greedy(prompt(length), 60)
        assert gap > 1e-3
        assert toy().reference.router_gap() > 1e-5
        assert want.ids == tuple(told)


def test_every_pattern_of_acceptance_gives_the_plain_ids_and_compiles_nothing_later():
    engine = scripted(4)
    compiled = None
    for right in ([0], [1], [4], [2, 0, 4, 1, 3]):
        set_script(engine, texts(), right)
        results = run(engine, [prompt(n) for n in LENGTHS])
        assert [r.ids for r in results] == [want.ids for want in answers()]
        compiled = compiled or num_compilations()
    # whatever the rows chose, the shapes were the same
    assert num_compilations() == compiled


def test_sampled_ids_and_logprobs_are_those_of_plain_sampling():
    drawn = sampling_from(GREEDY, temperature=0.8, top_k=20, seed=42, logprobs=0)
    wanted = answers(drawn)
    engine = scripted(4)
    told = [[*prompt(n), *want.ids] for n, want in zip(LENGTHS, wanted, strict=True)]
    set_script(engine, told, [3, 1, 0, 4, 2])
    for got, want in zip(run(engine, [prompt(n) for n in LENGTHS], drawn), wanted, strict=True):
        assert got.ids == want.ids
        assert sum(got.acceptance.accepted) > 20
        for ours, theirs in zip(got.logprobs, want.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@functools.cache
def drafter(name):
    """A drafter, its parameters, and the facts of one that keeps caches."""
    model = toy()
    if name == "model":  # the target itself, so that its drafts stand
        graph, _ = split(Gemma4(model.config, model.dtype))
        return ModelDrafter(graph, 3, PLAIN), model.params["target"], model.config
    raw = assistant_config(model.raw)
    graph, specs = split(Assistant(assistant_from_hf(raw), model.config, model.dtype))
    combined = CombinedDrafter(NgramDrafter(3), AssistantDrafter(graph, 3, PLAIN))
    return combined, place(specs, assistant_weights(raw)), None


@pytest.mark.parametrize("name", ["combined", "model"])
def test_greedy_ids_are_the_same_whoever_drafts(name):
    who, params, facts = drafter(name)
    engine = make(who, params, draft_model=facts)
    results = run(engine, [prompt(n) for n in LENGTHS])
    assert [r.ids for r in results] == [want.ids for want in answers()]
    if name == "model":
        assert all(r.acceptance.accepted[0] == r.acceptance.drafted[0] > 0 for r in results)


@pytest.mark.parametrize(
    "setting",
    [
        {"moe.impl": "ragged_dot", "cache.global_layers": "v_rot"},
        {"moe.impl": "interpret", "cache.local_layers": "paged"},
        {"attention.verify": "three_stage", "attention.group_heads": False},
        {"moe.impl": "interpret", "attention.impl": "interpret"},
    ],
    ids=["ragged_dot", "interpret", "three_stage", "all_kernels"],
)
def test_float32_greedy_text_is_the_same_with_every_switch(setting):
    engine = scripted(3, **setting)
    told = [[*prompt(n), *want.ids] for n, want in zip(LENGTHS, answers(), strict=True)]
    set_script(engine, told, [2, 0, 3, 1])
    results = run(engine, [prompt(n) for n in LENGTHS])
    assert [r.ids for r in results] == [want.ids for want in answers()]
    assert sum(results[0].acceptance.accepted) > 5


def test_a_named_kernel_that_cannot_run_here_is_refused():
    with pytest.raises(ValueError, match=r"moe.impl: 'triton' needs a GPU.*'dense'"):
        make(NoDrafter(), **{"moe.impl": "triton"})


@pytest.mark.parametrize("impl", ["dense", "interpret"])
def test_uniform_rows_make_bfloat16_logits_equal_bit_for_bit(impl):
    told = []
    settings = {"dtype": "bfloat16", "decode.uniform_rows": 5, "moe.impl": impl}
    asked = sampling_from(GREEDY, logprobs=2, max_tokens=25)
    for engine, right in (
        (make(NoDrafter(), **settings), None),
        (scripted(4, **settings), [2, 0, 4]),
    ):
        if right:
            known = [[*prompt(n), *r.ids] for n, r in zip(LENGTHS, told[0], strict=True)]
            set_script(engine, known, right)
        told.append(run(engine, [prompt(n) for n in LENGTHS], asked))
    for got, want in zip(*told, strict=True):
        assert got.ids == want.ids
        assert got.logprobs == want.logprobs
    assert sum(told[1][0].acceptance.accepted) > 5
