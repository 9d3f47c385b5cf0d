"""The choice of a draft length from measured costs and acceptance."""

import pytest

from carat_jax.engine.draft_length import CHOICES, DraftLength


def trained(cost: dict[int, float], accepted: int) -> DraftLength:
    """A policy that has seen every length's cost and many rounds of the longest."""
    policy = DraftLength()
    for length, seconds in cost.items():
        policy.observe_cost(length, seconds)
    for _ in range(200):
        policy.observe_drafts(accepted, CHOICES[-1])
    return policy


FLAT = dict.fromkeys(CHOICES, 1.0)


def test_every_length_is_tried_once_before_any_is_preferred():
    policy, tried = DraftLength(), []
    for _ in CHOICES:
        tried.append(policy.choose(most=15))
        policy.observe_cost(tried[-1], 1.0)
    assert tried == list(CHOICES)


@pytest.mark.parametrize(("accepted", "best"), [(7, 7), (3, 3), (2, 2), (0, 0)])
def test_with_flat_costs_it_drafts_as_far_as_drafts_stand(accepted, best):
    # given rounds that always accept the same number; nothing beyond is worth a draft
    policy = trained(FLAT | {m: 1 + 0.001 * m for m in CHOICES}, accepted)
    assert policy.choose(most=15) == best
    assert policy.tokens(7) == pytest.approx(1 + accepted, abs=0.01)


def test_a_length_that_costs_more_than_it_brings_is_left_alone():
    # given half of all first drafts standing, and rounds of 2 or more that take twice as long
    policy = trained({0: 0.9, 1: 1.0, 2: 2.0, 3: 2.0, 5: 2.0, 7: 2.0}, 7)
    for _ in range(200):
        policy.observe_drafts(0, 7)
        policy.observe_drafts(1, 7)
    assert policy.choose(most=15) == 1


def test_where_no_draft_pays_none_is_made_until_a_later_try_does_better_and_it_is_said_once(caplog):
    # given rounds that take twice as long with any draft, of which none stands
    policy = trained({0: 1.0} | dict.fromkeys(CHOICES[1:], 2.0), 0)
    chosen = [policy.choose(most=15) for _ in range(300)]
    assert chosen.count(0) > 290
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "auto drafts nothing for now" in told[0]
    assert "1000.000 ms without drafts beats 2000.000 ms with 1" in told[0]
    # when the tries in between stand after all
    for _ in range(40):
        policy.observe_drafts(7, 7)
    assert policy.choose(most=15) == 7
    # then the last token of an answer is no reason to speak
    policy = trained(FLAT, 7)
    assert policy.choose(most=0) == 0
    assert len(caplog.records) == 1


def test_a_round_without_drafts_says_nothing_about_drafts():
    policy = trained(FLAT, 7)
    policy.observe_drafts(0, 0)
    assert policy.tokens(7) == pytest.approx(8, abs=0.01)


def test_what_is_left_of_the_answer_bounds_the_choice():
    policy = trained(FLAT, 7)
    assert [policy.choose(most=m) for m in (15, 6, 4, 2, 1, 0)] == [7, 5, 3, 2, 1, 0]


def test_costs_are_looked_at_again_from_time_to_time():
    policy = trained(FLAT, 7)
    chosen = [policy.choose(most=15) for _ in range(64 * 6)]
    assert set(chosen) == set(CHOICES)
    assert chosen.count(7) > 370
