"""With uniform rows drafts change no bit in bfloat16; without them only near-ties may turn."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.bench import exactness
from carat_jax.bench.exactness import compare, make_prompts, runs
from carat_jax.bench.scripted import ScriptDrafter, script
from carat_jax.config import read_settings
from carat_jax.decoding.drafters import NoDrafter
from carat_jax.engine.api import Engine, Opened
from carat_jax.engine.drafting import Drafting
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import merge, split
from tests.engine.toy_engine import CONTEXT, prompt, tokenizer, toy

ROWS = 4
LAW = {"temperature": 0.0, "max_tokens": 40}


@functools.cache
def engine() -> Engine:
    """The toy in bfloat16, two slots."""
    model, dtype = toy(), jnp.dtype("bfloat16")
    params = jax.tree.map(lambda x: x.astype(dtype), model.params["target"])
    graph, _ = split(Gemma4(model.config, dtype))
    sizes = {"max_batch": 2, "prefill_chunks": [9], "max_context": CONTEXT}
    settings = read_settings(keywords={"engine": sizes})
    opened = Opened(Path(), model.config, graph, params, tokenizer())
    return Engine(settings, opened, Drafting(NoDrafter()))


@functools.cache
def prompts() -> list[list[int]]:
    """Before, at and past the window; some begin alike, so that slots could be continued from."""
    alike = [[*prompt(9), *prompt(n)] for n in (2, 5)]
    return [prompt(3), *alike, (prompt(7) * 4)[:24], prompt(8), prompt(40)]


def test_uniform_rows_make_every_bit_the_same_whoever_drafts():
    drafters = [("ngram", 3), ("script", 3), ("script", 1)]
    (_, _, plain), *others = runs(engine(), prompts(), ROWS, drafters, **LAW)
    for name, length, results in others:
        assert compare(plain, results).same_bits == len(plain), (name, length)
        places = results[0].acceptance.drafted
        assert len(places) == length
    # the scripted one did get every number of drafts right
    accepted = [result.acceptance.accepted for result in others[1][2]]
    assert (np.sum(accepted, axis=0) > 10).all()


def test_without_uniform_rows_only_near_ties_turn():
    (_, _, plain), (_, _, drafted) = runs(engine(), prompts(), 0, [("script", 3)], **LAW)
    found = compare(plain, drafted)
    # two units in the last place of a logit between 16 and 32
    assert found.widest_gap is None or found.widest_gap <= 0.25
    assert sum(drafted[0].acceptance.accepted) > 0


def test_a_comparison_counts_what_differs_and_how_close_it_was():
    made = engine().variant(decode={"uniform_rows": 0})
    plain = made.generate(prompts()[:3], **LAW, logprobs=2)
    assert compare(plain, plain) == exactness.Agreement(3, 3, None)
    # given one answer that takes another token at its third place
    taken = plain[1].ids[2]
    other = [plain[0], made.generate(prompts()[1], **LAW, logprobs=2, logit_bias={taken: -50})]
    found = compare(plain[:2], other)
    pairs = zip(plain[1].ids, other[1].ids, strict=True)
    place = next(i for i, (a, b) in enumerate(pairs) if a != b)
    (_, best), (_, second) = plain[1].logprobs[place].top
    assert found == exactness.Agreement(1, 1, best - second)


def test_a_script_goes_on_from_whatever_text_a_slot_has_begun():
    texts = [[2, 5, 6, 7, 8], [2, 5, 9, 7], [2, 4]]
    params = script(texts, num_drafts=2) | {"right": jnp.asarray([2, 2, 1, 2, 2])}
    ids = [[2, 5, 9, 0, 0, 0], [2, 5, 6, 7, 0, 0], [2, 3, 0, 0, 0, 0]]
    state = engine().loop._state
    state = dataclasses.replace(
        jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), state),
        ids=jnp.asarray(ids),
    )
    bank = dataclasses.replace(state.bank, lengths=jnp.asarray([2, 3, 1]))
    target = merge(engine()._opened.graph, engine()._opened.params)
    state = dataclasses.replace(state, bank=bank)
    proposal, _ = ScriptDrafter(2).propose(params, (), target, state)
    assert proposal.num.tolist() == [2, 2, 0]
    assert proposal.tokens[0, 0] == 7
    assert proposal.tokens[1, 0] == 8


def test_the_program_tells_each_run_and_fails_unless_all_bits_agree(tmp_path, monkeypatch):
    plain = engine().generate(prompts()[:2], temperature=0.0, max_tokens=3, logprobs=2)

    def told_apart(made, asked, num_rows, drafters, **law):
        yield "none", 0, plain
        yield from ((name, length, plain) for name, length in drafters)

    output = tmp_path / "rows.jsonl"
    wanted = ["--prompts=2", "--tokens=3", "--longest=5", "--uniform_rows=3", f"--output={output}"]
    exactness._FLAGS(["exactness", *wanted])
    monkeypatch.setattr(exactness, "runs", told_apart)
    monkeypatch.setattr(exactness.carat_jax, "load", lambda settings: engine())
    monkeypatch.setattr(exactness, "make_prompts", lambda *_: prompts()[:2])
    assert exactness.main() == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["uniform_rows"], row["drafter"], row["draft_len"]) for row in rows] == [
        (num_rows, *drafted)
        for num_rows in (3, 0)
        for drafted in [("none", 0), ("ngram", 1), ("ngram", 2), ("script", 1), ("script", 2)]
    ]
    assert all(row["same_ids"] == row["same_bits"] == row["prompts"] == 2 for row in rows)
    # and one bit that differs in a row that must not is the exit code
    monkeypatch.setattr(exactness, "compare", lambda *_: exactness.Agreement(2, 1, None))
    assert exactness.main() == 1


def test_prompts_are_the_models_own_words_of_every_length():
    made = make_prompts(engine(), 6, 20)
    assert [len(ids) for ids in made] == [4, 7, 10, 13, 16, 20]
    assert made[2][:4] == made[0]
    assert made[1][:4] != made[0]
