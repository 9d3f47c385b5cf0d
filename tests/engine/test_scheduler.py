"""Slots and the queue, without a model: order, sharing of prefills, refusal, restart."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carat_jax.engine.scheduler import Scheduler


@dataclasses.dataclass(eq=False)
class Writer:
    """What the scheduler looks at in a sample."""

    request: object
    ids: list = dataclasses.field(default_factory=list)
    is_finished: bool = False
    num_dispatched: int = 0


def samples_of(request, count=1, **fields):
    return [Writer(request, **fields) for _ in range(count)]


def test_first_come_first_served():
    scheduler = Scheduler(num_slots=2, max_queue=8)
    waiting = [*samples_of("a"), *samples_of("b"), *samples_of("c")]
    scheduler.submit(waiting)
    first, second = scheduler.admit(), scheduler.admit()
    assert [first.samples, second.samples] == [(waiting[0],), (waiting[1],)]
    assert scheduler.admit() is None
    scheduler.release(second.slots[0])
    third = scheduler.admit()
    assert third.samples == (waiting[2],)
    assert third.slots == second.slots
    assert scheduler.running == {first.slots[0]: waiting[0], third.slots[0]: waiting[2]}


def test_samples_of_a_request_start_together_as_far_as_slots_go():
    scheduler = Scheduler(num_slots=3, max_queue=8)
    same, other = samples_of("a", 5), samples_of("b")
    scheduler.submit([*same, *other])
    admission = scheduler.admit()
    assert admission.samples == tuple(same[:3])
    assert sorted(admission.slots) == [0, 1, 2]
    assert scheduler.admit() is None
    for slot in admission.slots:
        scheduler.release(slot)
    assert scheduler.admit().samples == tuple(same[3:])
    assert scheduler.admit().samples == tuple(other)


def test_samples_of_a_request_wait_for_slots_enough_for_all_of_them():
    scheduler = Scheduler(num_slots=4, max_queue=8)
    first, second = samples_of("a", 3), samples_of("b", 3)
    scheduler.submit([*first, *second])
    running = scheduler.admit()
    assert scheduler.admit() is None  # one slot is free, and a prefill for one of three is waste
    scheduler.release(running.slots[0])
    assert scheduler.admit() is None
    scheduler.release(running.slots[1])
    assert scheduler.admit().samples == tuple(second)


def test_samples_that_continue_from_different_ids_do_not_share_a_prefill():
    scheduler = Scheduler(num_slots=4, max_queue=8)
    fresh, begun = samples_of("a", 2), samples_of("a", ids=[7])
    scheduler.submit([*begun, *fresh])
    assert scheduler.admit().samples == tuple(begun)
    assert scheduler.admit().samples == tuple(fresh)


def test_the_queue_is_bounded_and_refuses_all_or_nothing():
    scheduler = Scheduler(num_slots=2, max_queue=3)
    assert scheduler.room() == 5
    with pytest.raises(ValueError, match=r"max_queue=3: 0 samples are waiting, 6 more"):
        scheduler.submit(samples_of("a", 6))
    assert scheduler.num_waiting == 0
    scheduler.submit(samples_of("a", 5))
    scheduler.admit()
    assert (scheduler.room(), scheduler.num_waiting, scheduler.num_free) == (0, 3, 0)
    with pytest.raises(ValueError, match=r"3 samples are waiting, 1 more"):
        scheduler.submit(samples_of("b"))


def test_finished_samples_take_no_place():
    scheduler = Scheduler(num_slots=1, max_queue=0)
    scheduler.submit(samples_of("a", 9, is_finished=True))
    assert scheduler.num_waiting == 0
    waiting = samples_of("b")
    scheduler.submit(waiting)
    waiting[0].is_finished = True
    scheduler.drop_finished()
    assert (scheduler.num_waiting, scheduler.admit()) == (0, None)


def test_a_slot_taken_outside_the_queue_is_nobody_elses():
    scheduler = Scheduler(num_slots=1, max_queue=2)
    slot = scheduler.take_slot()
    scheduler.submit(samples_of("a"))
    assert scheduler.take_slot() is None
    assert scheduler.admit() is None
    scheduler.release(slot)
    assert scheduler.admit().slots == (slot,)


def test_restart_puts_running_samples_first_and_forgets_what_was_in_flight():
    scheduler = Scheduler(num_slots=3, max_queue=8)
    running = [*samples_of("a", ids=[4, 5]), *samples_of("b"), *samples_of("c", ids=[6])]
    late = samples_of("d")
    scheduler.submit([*running, *late])
    for sample in running:
        scheduler.admit()
        sample.num_dispatched = len(sample.ids) + 2
    running[1].is_finished = True
    scheduler.restart()
    assert scheduler.running == {}
    assert scheduler.num_free == 3
    again = [scheduler.admit().samples[0] for _ in range(3)]
    assert again == [running[0], running[2], late[0]]
    assert [sample.num_dispatched for sample in again] == [2, 1, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("submit admit release restart".split()), st.integers(0, 4)))
)
def test_no_slot_is_lost_or_given_twice_whatever_happens(moves):
    scheduler, submitted = Scheduler(num_slots=3, max_queue=4), []
    for number, (move, value) in enumerate(moves):
        if move == "submit" and value <= scheduler.room():
            submitted += (new := samples_of(number, value))
            scheduler.submit(new)
        elif move == "admit":
            scheduler.admit()
        elif move == "release" and scheduler.running:
            slot = sorted(scheduler.running)[value % len(scheduler.running)]
            scheduler.running[slot].is_finished = True
            scheduler.release(slot)
        elif move == "restart":
            scheduler.restart()
        assert scheduler.num_free + len(scheduler.running) == 3
        alive = [sample for sample in submitted if not sample.is_finished]
        assert len(scheduler.running) + scheduler.num_waiting == len(alive)
        assert len({id(sample) for sample in scheduler.running.values()}) == len(scheduler.running)
