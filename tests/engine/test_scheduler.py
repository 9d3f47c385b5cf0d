"""Slots, queue and prefill, without a model: order, bounds, sharing, refusal, restart."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carat_jax.engine.chunks import plan_chunks
from carat_jax.engine.prefixes import NOTHING, Held, Reuse
from carat_jax.engine.scheduler import Scheduler


@dataclasses.dataclass(eq=False)
class Writer:
    """What the scheduler looks at in a sample."""

    request: object
    prompt: tuple = (2,)
    ids: list = dataclasses.field(default_factory=list)
    is_finished: bool = False
    num_dispatched: int = 0
    wants_more: bool = True

    @property
    def known_ids(self):
        return [*self.prompt, *self.ids]


def samples_of(request, count=1, length=1, **fields):
    prompt = tuple(range(2, 2 + length))
    return [Writer(request, prompt, **fields) for _ in range(count)]


def make(num_slots=2, max_queue=8, sizes=(8, 32), budget=32, reuse=None):
    return Scheduler(num_slots, max_queue, sizes, budget, reuse)


def gap(scheduler):
    """The chunks before the next round: (request, start, size)."""
    return [(c.admission.samples[0].request, c.start, c.size) for c in scheduler.chunks()]


# Order and slots.


def test_first_come_first_served():
    scheduler = make()
    waiting = [*samples_of("a"), *samples_of("b"), *samples_of("c")]
    scheduler.submit(waiting)
    assert gap(scheduler) == [("a", 0, 8), ("b", 0, 8)]
    assert scheduler.running == {0: waiting[0], 1: waiting[1]}
    assert gap(scheduler) == []
    scheduler.release(1)
    assert gap(scheduler) == [("c", 0, 8)]
    assert scheduler.running == {0: waiting[0], 1: waiting[2]}


def test_samples_of_a_request_start_together_as_far_as_slots_go():
    scheduler = make(num_slots=3)
    same, other = samples_of("a", 5), samples_of("b")
    scheduler.submit([*same, *other])
    assert gap(scheduler) == [("a", 0, 8)]
    assert list(scheduler.running.values()) == same[:3]
    for slot in range(3):
        scheduler.release(slot)
    assert gap(scheduler) == [("a", 0, 8), ("b", 0, 8)]
    assert list(scheduler.running.values()) == [*same[3:], *other]


def test_samples_of_a_request_wait_for_slots_enough_for_all_of_them():
    scheduler = make(num_slots=4)
    scheduler.submit([*samples_of("a", 3), *samples_of("b", 3), *samples_of("c")])
    assert gap(scheduler) == [("a", 0, 8)]
    # one slot is free, but a prefill for one of three is waste, and nobody overtakes
    assert gap(scheduler) == []
    scheduler.release(0)
    assert gap(scheduler) == []
    scheduler.release(1)
    assert gap(scheduler) == [("b", 0, 8)]
    assert scheduler.num_waiting == 1


def test_samples_that_continue_from_different_ids_do_not_share_a_prefill():
    scheduler = make(num_slots=4)
    scheduler.submit([*samples_of("a", ids=[7]), *samples_of("a", 2)])
    admissions = [scheduler.admit(), scheduler.admit()]
    assert [(len(a.samples), a.ids) for a in admissions] == [(1, [2, 7]), (2, [2])]


def test_a_slot_taken_outside_the_queue_is_nobody_elses():
    scheduler = make(num_slots=1)
    slot = scheduler.take_slot()
    scheduler.submit(samples_of("a"))
    assert scheduler.take_slot() is None
    assert gap(scheduler) == []
    scheduler.restart()
    assert gap(scheduler) == []
    scheduler.release(slot)
    assert gap(scheduler) == [("a", 0, 8)]


# The queue.


def test_the_queue_is_bounded_and_refuses_all_or_nothing():
    scheduler = make(max_queue=3)
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
    scheduler = make(num_slots=1, max_queue=0)
    scheduler.submit(samples_of("a", 9, is_finished=True))
    assert scheduler.num_waiting == 0
    waiting = samples_of("b")
    scheduler.submit(waiting)
    waiting[0].is_finished = True
    assert scheduler.drop_finished() == []
    assert (scheduler.num_waiting, scheduler.admit()) == (0, None)


# Prefill between rounds.


def test_a_long_prompt_is_prefilled_in_one_chunk_a_gap_while_others_run():
    scheduler = make()
    (short,) = samples_of("short")
    scheduler.submit([short])
    assert gap(scheduler) == [("short", 0, 8)]
    scheduler.submit(samples_of("long", length=100))
    gaps = [gap(scheduler) for _ in range(5)]
    assert gaps == [
        [("long", 0, 32)], [("long", 32, 32)], [("long", 64, 32)], [("long", 96, 8)], []
    ]  # fmt: skip
    assert scheduler.num_filling == 0


def test_short_prompts_share_a_gap_and_long_ones_wait_their_turn():
    scheduler = make(num_slots=6)
    scheduler.submit(samples_of("running"))
    gap(scheduler)
    for name, length in (("a", 5), ("b", 8), ("c", 40), ("d", 3)):
        scheduler.submit(samples_of(name, length=length))
    assert gap(scheduler) == [("a", 0, 8), ("b", 0, 8)]  # 16 are left, the next takes 32
    assert gap(scheduler) == [("c", 0, 32)]
    assert gap(scheduler) == [("c", 32, 8), ("d", 0, 8)]


def test_a_small_budget_cuts_prompts_smaller_and_only_while_somebody_runs():
    scheduler = make(num_slots=3, budget=20)
    scheduler.submit(samples_of("a", length=40))
    scheduler.submit(samples_of("b", length=40))
    # nobody runs: whole chunks, one largest a step
    assert gap(scheduler) == [("a", 0, 32)]
    assert gap(scheduler) == [("a", 32, 8)]  # what follows would be 40 with the next chunk
    assert gap(scheduler) == [("b", 0, 8), ("b", 8, 8)]
    scheduler.running[0].wants_more = False
    assert gap(scheduler) == [("b", 16, 32)]


def test_cancelled_while_its_prompt_is_prefilled():
    scheduler = make(num_slots=1)
    (cancelled,) = samples_of("a", length=100)
    scheduler.submit([cancelled])
    assert gap(scheduler) == [("a", 0, 32)]
    cancelled.is_finished = True
    (dropped,) = scheduler.drop_finished()
    assert (dropped.samples, dropped.slots, dropped.done) == ((cancelled,), (0,), 32)
    assert (scheduler.num_filling, scheduler.num_free) == (0, 0)
    scheduler.release(0)
    assert scheduler.is_idle


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (1, [128]),
        (100, [128]),
        (130, [128, 128]),  # not 512, of which 382 would be padding
        (400, [512]),
        (1024, [512, 512]),
        (2000, [2048]),
        (2500, [2048, 512]),
        (5000, [2048, 2048, 512, 512]),
        (5500, [6144]),  # 644 of padding take less than reading the weights three times more
        (6000, [6144]),
        (8000, [6144, 2048]),
        (6144 * 20 + 1, [6144] * 20 + [128]),
    ],
)
def test_chunks_weigh_padding_against_reading_the_weights_again(length, sizes):
    chunks = plan_chunks(length, (128, 512, 2048, 6144))
    assert [size for _, size in chunks] == sizes
    assert [start for start, _ in chunks] == [sum(sizes[:i]) for i in range(len(sizes))]


def test_chunks_of_one_size_cut_any_length():
    assert plan_chunks(20_000, (2,)) == [(start, 2) for start in range(0, 20_000, 2)]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=8), st.integers(8, 200))
def test_no_gap_is_longer_than_the_budget_and_nothing_is_prefilled_twice(lengths, budget):
    scheduler = make(num_slots=9, max_queue=9, sizes=(8, 32, 64), budget=budget)
    scheduler.submit(samples_of("running"))
    gap(scheduler)
    for number, length in enumerate(lengths):
        scheduler.submit(samples_of(number, length=length))
    covered, order = {}, []
    for _ in range(1000):
        if not (chunks := gap(scheduler)):
            break
        assert sum(size for _, _, size in chunks) <= budget
        for number, start, size in chunks:
            assert start == covered.get(number, 0)
            covered[number] = start + size
            order.append(number)
    assert order == sorted(order)
    for number, length in enumerate(lengths):
        sizes = [size for size in (8, 32, 64) if size <= budget]
        assert covered[number] == sum(size for _, size in plan_chunks(length, sizes)) >= length
    assert len(scheduler.running) == len(lengths) + 1


# Slots that are continued from.


def test_a_prompt_continues_from_the_slot_that_holds_its_beginning():
    scheduler = make(num_slots=3, reuse=Reuse(max_rollback=4, capacity=8))
    for slot, ids in enumerate(([2, 3, 4, 5], [2, 3, 4, 5, 6, 7], [2, 9, 9])):
        scheduler.take_slot()
        scheduler.release(slot, Held(tuple(ids), len(ids) + 1))
    scheduler.submit([Writer("next", (2, 3, 4, 5, 6, 7, 8, 9, 10))])
    (chunk,) = scheduler.chunks()
    assert (chunk.admission.slots, chunk.start, chunk.ids) == ((1,), 6, [8, 9, 10])
    assert (chunk.is_first, chunk.is_last, chunk.admission.reused) == (True, True, 6)
    # and a stranger takes the slot that has been free for longest
    scheduler.submit([Writer("other", (2, 4, 4, 4))])
    (chunk,) = scheduler.chunks()
    assert (chunk.admission.slots, chunk.start) == ((0,), 0)


def test_samples_of_a_prompt_continue_together_and_forget_what_their_slots_held():
    scheduler = make(num_slots=2, reuse=Reuse(4, 64))
    for slot in (0, 1):
        scheduler.take_slot()
        scheduler.release(slot, Held((2, 3, 4, 5) if slot else (2, 8), 9))
    scheduler.submit([Writer("a", (2, 3, 4, 5, 6))] * 2)
    (chunk,) = scheduler.chunks()
    assert (chunk.admission.slots, chunk.start) == ((1, 0), 4)
    # a row that was written further than the prompt reaches is remembered
    assert chunk.admission.furthest == 9
    scheduler.restart()
    assert set(scheduler._free.values()) == {NOTHING}


@pytest.mark.parametrize(
    ("held", "furthest", "ids", "length"),
    [
        (range(20), 20, range(30), 20),  # the next turn
        (range(20), 24, range(30), 20),  # after steps past the stop, within the slack
        (range(20), 25, range(30), 0),  # beyond it
        (range(20), 25, range(20), 0),
        (range(20), 23, range(20), 19),  # the last id is always prefilled
        (range(20), 20, range(16), 0),  # cut back by five
        (range(20), 20, range(17), 16),
        (range(12), 16, range(7), 6),  # a ring of 16 that never went round can be cut anywhere
        (range(12), 17, range(7), 0),
        (range(12), 16, range(6), 0),  # less than half of it would be kept
        (range(12), 16, [0, 1, 2, 99], 0),
        (range(12), 16, [5, 6, 7], 0),
        ((), 0, range(5), 0),
        (range(3), 3, [0], 0),
    ],
)
def test_how_much_of_a_slot_can_be_kept(held, furthest, ids, length):
    rule = Reuse(max_rollback=4, capacity=16)
    assert rule.length(Held(tuple(held), furthest), list(ids)) == length


# Restart.


def test_restart_puts_all_that_have_slots_first_in_their_order():
    scheduler = make(num_slots=4)
    running = [*samples_of("a", ids=[4, 5]), *samples_of("b"), *samples_of("c", ids=[6])]
    filling, late = samples_of("d", length=90), samples_of("e")
    scheduler.submit([*running, *filling, *late])
    gap(scheduler)
    for sample in running:
        sample.num_dispatched = len(sample.ids) + 2
    running[1].is_finished = True
    assert scheduler.num_filling == 1
    scheduler.restart()
    assert scheduler.running == {}
    assert (scheduler.num_free, scheduler.num_filling) == (4, 0)
    again = [scheduler.admit().samples[0] for _ in range(4)]
    assert again == [running[0], running[2], filling[0], late[0]]
    assert [sample.num_dispatched for sample in again] == [2, 1, 0, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("submit gap release cancel take restart".split()), st.integers(0, 4)
        ),
        max_size=40,
    )
)
def test_no_slot_is_lost_or_given_twice_and_everybody_starts_in_order(moves):
    scheduler, submitted, outside = make(num_slots=3, max_queue=4), [], []
    for number, (move, value) in enumerate(moves):
        if move == "submit" and value <= scheduler.room():
            submitted += (new := samples_of(number, value, length=1 + 30 * value))
            scheduler.submit(new)
        elif move == "gap":
            gap(scheduler)
        elif move == "release" and scheduler.running:
            slot = sorted(scheduler.running)[value % len(scheduler.running)]
            scheduler.running[slot].is_finished = True
            scheduler.release(slot)
        elif move == "cancel" and submitted:
            submitted[-1 - value % len(submitted)].is_finished = True
            for admission in scheduler.drop_finished():
                for slot in admission.slots:
                    scheduler.release(slot)
            for slot, sample in list(scheduler.running.items()):
                if sample.is_finished:
                    scheduler.release(slot)
        elif move == "take":
            outside += [slot] if (slot := scheduler.take_slot()) is not None else []
        elif move == "restart":
            scheduler.restart()
        taken = [*scheduler.running, *(s for a in scheduler.filling for s in a.slots), *outside]
        assert len(set(taken)) == len(taken)
        assert scheduler.num_free + len(taken) == 3
        has_slot = [*scheduler.running.values(), *(s for a in scheduler.filling for s in a.samples)]
        alive = [sample for sample in submitted if not sample.is_finished]
        # those with slots were submitted first
        started = [sample for sample in has_slot if not sample.is_finished]
        assert set(map(id, started)) == set(map(id, alive[: len(started)]))
        assert len(started) + scheduler.num_waiting == len(alive)
