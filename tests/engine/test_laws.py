"""What an engine draws from, tells and scores, against the reference's law of every position."""

import numpy as np
import pytest

from carat_jax.config import sampling_from
from tests.engine.toy_engine import (
    CONTEXT,
    HALVED,
    SUPPRESSED,
    assert_greedy,
    prompt,
    reference_logits,
    reference_logprobs,
    toy,
)
from tests.oracle import log_softmax, softmax

# Laws and log-probabilities.


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_the_reference_log_softmax_before_temperature(engine, temperature):
    ids = prompt(21)
    result = engine.generate(
        ids, temperature=temperature, seed=8, top_k=5, max_tokens=12, logprobs=3, ignore_eos=True
    )
    law = reference_logprobs(ids, result.ids)
    assert len(result.logprobs) == 12
    for row, token, info in zip(law, result.ids, result.logprobs, strict=True):
        assert info.logprob == pytest.approx(row[token], abs=2e-4)
        assert [i for i, _ in info.top] == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose([p for _, p in info.top], -np.sort(-row)[:3], atol=2e-4)


def test_logprobs_of_the_chosen_token_alone(engine):
    result = engine.generate(prompt(5), max_tokens=3, logprobs=0, ignore_eos=True)
    law = reference_logprobs(prompt(5), result.ids)
    np.testing.assert_allclose(
        [info.logprob for info in result.logprobs], law[range(3), result.ids], atol=2e-4
    )
    assert all(info.top == () for info in result.logprobs)
    assert engine.generate(prompt(5), max_tokens=3).logprobs is None


def test_repetition_penalty_changes_the_law_of_seen_tokens(engine):
    # given a penalty over prompt and output, written out from transformers' formula
    ids = prompt(9, seed=2)
    result = engine.generate(
        ids, repetition_penalty=1.5, temperature=0.0, max_tokens=15, logprobs=0, ignore_eos=True
    )
    known = list(ids)
    for token, info in zip(result.ids, result.logprobs, strict=True):
        logits = reference_logits(known)[-1]
        seen = np.unique(known)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
        assert token == logits.argmax()
        assert info.logprob == pytest.approx(log_softmax(logits)[token], abs=2e-4)
        known.append(token)
    assert result.ids != engine.generate(ids, max_tokens=15, ignore_eos=True).ids


def test_logit_bias_changes_the_law(engine):
    ids, bias = prompt(9), {320: 2.5, 150: -4.0}
    result = engine.generate(ids, logit_bias=bias, max_tokens=5, logprobs=0, ignore_eos=True)

    def biased(logits):
        logits[:, 320] += 2.5
        logits[:, 150] -= 4.0
        return logits

    law = reference_logprobs(ids, result.ids, biased)
    assert result.ids == tuple(law.argmax(axis=-1))
    np.testing.assert_allclose(
        [info.logprob for info in result.logprobs], law.max(axis=-1), atol=2e-4
    )


def test_a_bias_does_not_stay_behind_in_the_slot(engine):
    forced = engine.generate([prompt(5)] * 4, logit_bias={320: 1e9}, max_tokens=4)
    assert all(result.ids == (320,) * 4 for result in forced)
    plain = engine.generate([prompt(5)] * 4, max_tokens=4, ignore_eos=True)
    for result in plain:
        assert_greedy(result, 4)


def test_a_hook_is_part_of_the_law(scripted):
    # given the scripted engine past the position from which its hook halves the logits
    ids = prompt(HALVED)
    result = scripted.generate(ids, max_tokens=6, logprobs=0, temperature=1.0, seed=2)
    law = reference_logprobs(ids, result.ids, lambda logits: logits / 2)
    np.testing.assert_allclose(
        [info.logprob for info in result.logprobs],
        law[range(len(result.ids)), result.ids],
        atol=2e-4,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_tokens_are_never_said_and_the_law_is_over_the_others(engine, temperature):
    bias = {i: 50.0 for i in SUPPRESSED} | {320: 49.0, 321: 48.0}
    result = engine.generate(
        prompt(9), n=2, temperature=temperature, seed=4, logit_bias=bias, max_tokens=8, logprobs=20
    )
    for output in result.outputs:
        assert not set(SUPPRESSED) & set(output.ids)
        for info in output.logprobs:
            assert not set(SUPPRESSED) & {i for i, _ in info.top}
            assert sum(np.exp(p) for _, p in info.top) == pytest.approx(1, abs=1e-3)


# Scores.


@pytest.mark.parametrize("length", [1, 2, 8, 9, 33, CONTEXT])
def test_scores_are_the_reference_log_softmax(engine, length):
    ids = prompt(length, seed=5)
    scores = engine.score(ids, num_top=2)
    law = log_softmax(toy().reference.logits(ids))
    assert len(scores) == length
    assert scores[0] is None
    for i, info in enumerate(scores[1:]):
        assert info.logprob == pytest.approx(law[i, ids[i + 1]], abs=2e-4)
        assert [token for token, _ in info.top] == np.argsort(-law[i])[:2].tolist()


def test_scores_of_an_answer_are_its_own_logprobs(engine):
    result = engine.generate(
        prompt(21), max_tokens=10, temperature=0.8, seed=1, logprobs=0, ignore_eos=True
    )
    ids = [*result.prompt_ids, *result.ids]
    scores = engine.score(ids)[21:]
    # a score knows no suppressed tokens, an answer's law is over the others
    law = softmax(toy().reference.logits(ids)[20:-1])
    allowed = np.log(1 - law[:, list(SUPPRESSED)].sum(axis=-1))
    np.testing.assert_allclose(
        [info.logprob for info in scores],
        [info.logprob for info in result.logprobs] + allowed,
        atol=2e-4,
    )


def test_scoring_waits_for_a_slot_and_disturbs_nobody(engine):
    requests = [
        engine.loop.submit(prompt(n), sampling_from(engine.config.sampling, ignore_eos=True))
        for n in (5, 8, 9, 21, 2, 40)
    ]
    engine.loop.step()
    scores = engine.score(prompt(9))
    law = log_softmax(toy().reference.logits(prompt(9)))
    want = [law[i, token] for i, token in enumerate(prompt(9)[1:])]
    np.testing.assert_allclose([info.logprob for info in scores[1:]], want, atol=2e-4)
    engine.loop.run(requests)
    for request in requests:
        assert_greedy(request.result(), 16)
