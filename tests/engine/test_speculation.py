"""Speculative decoding gives plain decoding's answer, whatever is drafted and however much stands.

A scripted drafter proposes, place by place, right tokens and then wrong ones, so that every pattern
of acceptance is reached without trained weights.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.config import sampling_from
from tests.engine.drafter_toys import GREEDY, W, loop, plain, run, set_script
from tests.engine.toy_engine import CONTEXT, SUPPRESSED, prompt, toy


def test_plain_greedy_ids_are_the_references():
    want, gap = toy().reference.greedy(prompt(12), 60)
    assert gap > 1e-3
    assert list(plain(12).ids) == list(want)


@pytest.mark.parametrize("num_drafts", [1, 4, 9])
def test_every_pattern_of_acceptance_gives_the_plain_ids(num_drafts):
    # given rings of 8 (9 drafts are more than a window) and prompts before, at and past the window
    engine = loop("script", num_drafts)
    patterns = [[a] for a in range(num_drafts + 1)]
    patterns.append(np.random.default_rng(num_drafts).integers(0, num_drafts + 1, 97))
    lengths = [1, 5, 7, 8, 9, 12, 20]
    for (i, right), turn in itertools.product(enumerate(patterns), (0, 3, 5)):
        length = lengths[(i + turn) % len(lengths)]
        text = [*prompt(length), *plain(length).ids]
        set_script(engine, [text], right)
        result = run(engine, [prompt(length)])[0]
        assert result.ids == plain(length).ids
        # and the counters say what the script did
        if len(right) == 1 and right[0] < num_drafts:
            by_luck = sum(result.acceptance.accepted[right[0] :])  # wrong ids may be right
            assert by_luck <= 2
    # and a fully right script needs no more passes than it must
    set_script(engine, [[*prompt(12), *plain(12).ids]], [num_drafts])
    before = engine.counters.rounds
    run(engine, [prompt(12)])
    assert engine.counters.rounds - before <= -(-60 // (num_drafts + 1)) + 2


def test_live_cache_entries_are_those_of_plain_decoding_after_every_round():
    # given plain decoding that keeps every position of every layer
    reference = loop("none", cache__local_layers="full")
    run(reference, [prompt(12)])
    # when a round accepts some drafts and rejects others
    engine = loop("script", 4)
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


def test_nothing_but_live_entries_is_ever_read():
    # given two slots that accept different counts beside one that was never used
    engine = loop("script", 4, num_slots=3)
    lengths = (3, 21)
    set_script(engine, [[*prompt(n), *plain(n).ids] for n in lengths], [0, 2, 4, 1])
    requests = [engine.submit(prompt(n), GREEDY) for n in lengths]
    while not engine.is_idle:
        engine.step()
        # when all that no later query sees, rejected drafts among it, is huge after every round
        engine._state = poisoned(engine._state)
    for n, request in zip(lengths, requests, strict=True):
        assert request.result().ids == plain(n).ids


def poisoned(state):
    """The state with every dead cache entry replaced by a huge number."""
    layers = {}
    for index, cache in state.bank.layers.items():
        rows = [np.array(cache.k), np.array(cache.v)]
        for slot, held in enumerate(np.asarray(state.bank.lengths)):
            first = max(held - W, 0) if toy().config.layer(index).is_sliding else 0
            live = np.zeros(cache.capacity, bool)
            live[np.arange(first, held) % cache.capacity] = True
            for row in rows:
                row[slot][:, ~live] = 1e30
        k, v = map(jnp.asarray, rows)
        layers[index] = dataclasses.replace(cache, k=k, v=v)
    return dataclasses.replace(state, bank=dataclasses.replace(state.bank, layers=layers))


def test_slots_that_accept_different_counts_do_not_disturb_each_other():
    engine = loop("script", 4, num_slots=3)
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
    engine = loop("script", 4)
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
    engine = loop("script", 4)
    set_script(engine, [[*prompt(12), *text]], [4])
    for limit, reason in ((60, "stop"), (end, "length"), (end + 1, "stop"), (end + 2, "stop")):
        if limit == 0:
            continue
        params = sampling_from(GREEDY, max_tokens=limit, stop_token_ids=(stop,), logprobs=0)
        got = run(engine, [prompt(12)], params)[0]
        want = run(loop("none"), [prompt(12)], params)[0]
        assert got.finish_reason == want.finish_reason == reason
        assert got.ids == want.ids == text[: min(end + 1, limit)]
        assert got.text == want.text
        assert len(got.logprobs) == len(got.ids)


def test_drafts_past_the_context_are_never_written():
    # given a text that leaves six places, and a drafter that is always right and always longer
    ids = (prompt(7) * 20)[: CONTEXT - 6]
    params = sampling_from(GREEDY, max_tokens=50)
    want = run(loop("none"), [ids], params)[0]
    engine = loop("script", 9)
    set_script(engine, [[*ids, *want.ids]], [9])
    got = run(engine, [ids], params)[0]
    assert (got.ids, got.finish_reason) == (want.ids, "length")
    assert len(got.ids) == 6


def test_looking_up_gives_the_plain_ids_on_a_text_that_repeats():
    ids = (prompt(7) * 9)[:50]
    want = run(loop("none"), [ids], sampling_from(GREEDY, max_tokens=40))[0]
    got = run(loop("ngram", 4), [ids], sampling_from(GREEDY, max_tokens=40))[0]
    assert got.ids == want.ids
    assert got.acceptance.drafted[0] > 0


def test_suppressed_tokens_are_neither_emitted_nor_accepted():
    params = sampling_from(GREEDY, logit_bias=tuple((i, 50.0) for i in SUPPRESSED))
    engine = loop("script", 4)
    set_script(engine, [[SUPPRESSED[0]] * CONTEXT], [4])
    got = run(engine, [prompt(12)], params)[0]
    assert not set(SUPPRESSED) & set(got.ids)
    assert got.ids == plain(12).ids
    assert sum(got.acceptance.accepted) == 0
