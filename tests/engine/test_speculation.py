"""Speculative decoding gives plain decoding's answer, whatever is drafted and however much stands.

A scripted drafter proposes, place by place, right tokens and then wrong ones, so that every pattern
of acceptance is reached without trained weights.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.config import SamplingParams, read_settings, sampling_from
from carat_jax.decoding.drafters import NgramDrafter, NoDrafter, Proposal, look_up
from carat_jax.engine.compile_counter import num_compilations
from carat_jax.engine.draft_length import CHOICES
from carat_jax.engine.drafting import Drafting
from carat_jax.engine.engine import EngineLoop
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import split
from tests.engine.toy_engine import CONTEXT, SUPPRESSED, prompt, tokenizer, toy

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


@functools.cache
def loop(drafter, num_slots: int = 1, local_layers: str = "ring", draft_len=3) -> EngineLoop:
    """An engine of the toy with a drafter; compiled once for all tests."""
    model = toy()
    graph, _ = split(Gemma4(model.config, model.dtype))
    engine = {"max_batch": num_slots, "prefill_chunks": [9], "max_context": CONTEXT}
    sections = {"engine": engine, "cache.local_layers": local_layers}
    sections["decode.draft_len"] = draft_len
    chosen = read_settings(keywords={"dtype": "float32", **sections}).build()
    return EngineLoop(
        chosen, model.config, graph, model.params["target"], tokenizer(),
        drafting=Drafting(drafter, _script(num_slots)),
    )  # fmt: skip


def _script(num_slots: int):
    return (
        jnp.zeros((num_slots, CONTEXT + 16), jnp.int32),
        jnp.zeros(CONTEXT + 16, jnp.int32),
    )


def set_script(engine: EngineLoop, texts, right) -> None:
    """What the drafter knows: whole texts by slot, and how many right tokens at each position."""
    truth, pattern = (np.array(x) for x in _script(engine.num_slots))
    for slot, text in enumerate(texts):
        truth[slot, : len(text)] = text
    pattern[:] = np.resize(right, pattern.shape)
    engine._params["draft"] = (jnp.asarray(truth), jnp.asarray(pattern))


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
    return run(loop(NoDrafter()), [prompt(length)], params)[0]


def test_plain_greedy_ids_are_the_references():
    want, gap = toy().reference.greedy(prompt(12), 60)
    assert gap > 1e-3
    assert list(plain(12).ids) == list(want)


@pytest.mark.parametrize("num_drafts", [1, 4, 9])
def test_every_pattern_of_acceptance_gives_the_plain_ids(num_drafts):
    # given rings of 8 (9 drafts are more than a window) and prompts before, at and past the window
    engine = loop(ScriptDrafter(num_drafts))
    patterns = [[a] for a in range(num_drafts + 1)]
    patterns.append(np.random.default_rng(num_drafts).integers(0, num_drafts + 1, 97))
    for length, right in zip([1, 5, 7, 8, 9, 12, 20] * 2, patterns, strict=False):
        text = [*prompt(length), *plain(length).ids]
        set_script(engine, [text], right)
        result = run(engine, [prompt(length)])[0]
        assert result.ids == plain(length).ids
        # and the counters say what the script did
        if len(right) == 1 and right[0] < num_drafts:
            assert (
                sum(result.acceptance.accepted[right[0] :]) <= 2
            )  # wrong ids may be right by luck
    # and a fully right script needs no more passes than it must
    set_script(engine, [[*prompt(12), *plain(12).ids]], [num_drafts])
    before = engine.counters.rounds
    run(engine, [prompt(12)])
    assert engine.counters.rounds - before <= -(-60 // (num_drafts + 1)) + 2


def test_live_cache_entries_are_those_of_plain_decoding_after_every_round():
    # given plain decoding that keeps every position of every layer
    reference = loop(NoDrafter(), local_layers="full")
    run(reference, [prompt(12)])
    # when a round accepts some drafts and rejects others
    engine = loop(ScriptDrafter(4))
    set_script(engine, [[*prompt(12), *plain(12).ids]], [2, 0, 4, 1, 3])
    request = engine.submit(prompt(12), GREEDY)
    held = 0
    while not request.is_finished and held < 60:
        engine.step()
        held = int(engine._state.bank.lengths[0])
        # then every position that a later query can see holds what plain decoding put there
        for index, ours in engine._state.bank.layers.items():
            theirs = reference._state.bank.layers[index]
            first = max(held - W, 0) if toy().config.layer(index).is_sliding else 0
            live = np.arange(first, held)
            for name in ("k", "v"):
                got = np.asarray(getattr(ours, name))[0][:, live % ours.capacity]
                np.testing.assert_allclose(got, getattr(theirs, name)[0][:, live], atol=2e-5)
    engine.cancel(request)
    assert held >= 60


def test_slots_that_accept_different_counts_do_not_disturb_each_other():
    engine = loop(ScriptDrafter(4), num_slots=3)
    lengths = (3, 8, 21)
    set_script(engine, [[*prompt(n), *plain(n).ids] for n in lengths], [0, 2, 4, 1])
    results = run(engine, [prompt(n) for n in lengths])
    assert [r.ids for r in results] == [plain(n).ids for n in lengths]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_sampled_ids_and_logprobs_are_those_of_plain_sampling(penalty):
    params = sampling_from(
        GREEDY,
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        seed=42,
        logprobs=3,
        repetition_penalty=penalty,
    )
    want = plain(12, params)
    engine = loop(ScriptDrafter(4))
    set_script(engine, [[*prompt(12), *want.ids]], [3, 1, 0, 4, 2])
    got = run(engine, [prompt(12)], params)[0]
    assert got.ids == want.ids
    assert max(sum(got.acceptance.accepted), 1) > 20
    for ours, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


@pytest.mark.parametrize("place", range(10))
def test_a_stop_inside_an_accepted_block_ends_the_answer_there(place):
    text = plain(12).ids
    stop = text[place]
    end = text.index(stop)
    engine = loop(ScriptDrafter(4))
    set_script(engine, [[*prompt(12), *text]], [4])
    for limit, reason in ((60, "stop"), (end, "length"), (end + 1, "stop"), (end + 2, "stop")):
        if limit == 0:
            continue
        params = sampling_from(GREEDY, max_tokens=limit, stop_token_ids=(stop,), logprobs=0)
        got = run(engine, [prompt(12)], params)[0]
        want = run(loop(NoDrafter()), [prompt(12)], params)[0]
        assert got.finish_reason == want.finish_reason == reason
        assert got.ids == want.ids == text[: min(end + 1, limit)]
        assert got.text == want.text
        assert len(got.logprobs) == len(got.ids)


def test_drafts_past_the_context_are_never_written():
    # given a prompt that leaves six places, and a drafter that is always right and always longer
    ids = prompt(CONTEXT - 6)
    params = sampling_from(GREEDY, max_tokens=50)
    want = run(loop(NoDrafter()), [ids], params)[0]
    engine = loop(ScriptDrafter(9))
    set_script(engine, [[*ids, *want.ids]], [9])
    got = run(engine, [ids], params)[0]
    assert (got.ids, got.finish_reason) == (want.ids, "length")
    assert len(got.ids) == 6


def test_looked_up_tokens_are_those_after_the_latest_longest_match():
    # given a text whose end "3 4 5" occurred twice, followed by 6 and by 8 9
    ids = np.zeros((3, 32), np.int32)
    texts = [[3, 4, 5, 6, 1, 3, 4, 5, 8, 9, 3, 4, 5], [1, 2, 3, 4], [7, 7, 7, 7]]
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts])
    found, num = look_up(jnp.asarray(ids), lengths, num_drafts=4, longest=4, shortest=2)
    assert num.tolist() == [4, 0, 1]
    assert found[0].tolist() == [8, 9, 3, 4]
    assert found[2, 0] == 7


def test_looking_up_gives_the_plain_ids_on_a_text_that_repeats():
    ids = (prompt(7) * 9)[:50]
    want = run(loop(NoDrafter()), [ids], sampling_from(GREEDY, max_tokens=40))[0]
    got = run(loop(NgramDrafter(4)), [ids], sampling_from(GREEDY, max_tokens=40))[0]
    assert got.ids == want.ids
    assert got.acceptance.drafted[0] > 0


def test_a_chosen_draft_length_gives_the_plain_ids_and_compiles_nothing_later():
    engine = loop(ScriptDrafter(CHOICES[-1]), draft_len="auto")
    engine.warm_up()
    compiled = num_compilations()
    text = [*prompt(12), *plain(12).ids]
    for right in ([7], [0], [2, 1]):
        set_script(engine, [text], right)
        assert run(engine, [prompt(12)])[0].ids == plain(12).ids
    assert num_compilations() == compiled


def test_suppressed_tokens_are_neither_emitted_nor_accepted():
    params = sampling_from(GREEDY, logit_bias=tuple((i, 50.0) for i in SUPPRESSED))
    engine = loop(ScriptDrafter(4))
    set_script(engine, [[SUPPRESSED[0]] * CONTEXT], [4])
    got = run(engine, [prompt(12)], params)[0]
    assert not set(SUPPRESSED) & set(got.ids)
    assert got.ids == plain(12).ids
    assert sum(got.acceptance.accepted) == 0


def test_uniform_rows_make_bfloat16_logits_equal_bit_for_bit():
    model = toy()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params["target"])
    graph, _ = split(Gemma4(model.config, jnp.dtype("bfloat16")))
    told = []
    for drafter, right in (
        (NoDrafter(), [0]),
        (ScriptDrafter(4), [2, 0, 4]),
        (NgramDrafter(3), [0]),
    ):
        engine = {"max_batch": 2, "prefill_chunks": [9], "max_context": CONTEXT}
        chosen = read_settings(keywords={"engine": engine, "decode.uniform_rows": 5}).build()
        made = EngineLoop(
            chosen, model.config, graph, params, tokenizer(),
            drafting=Drafting(drafter, _script(2)),
        )  # fmt: skip
        lengths = (5, 21)
        if told:
            texts = [[*prompt(n), *r.ids] for n, r in zip(lengths, told[0], strict=True)]
            set_script(made, texts, right)
        told.append(run(made, [prompt(n) for n in lengths], sampling_from(GREEDY, logprobs=5)))
    for other in told[1:]:
        for got, want in zip(other, told[0], strict=True):
            assert got.ids == want.ids
            assert got.logprobs == want.logprobs
    assert sum(told[1][0].acceptance.accepted) > 20
