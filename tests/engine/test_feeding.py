"""Batches through a bounded queue, without a model: order, how many at once, what an end leaves."""

import types

import pytest

from carat_jax.config import SamplingParams, sampling_from
from carat_jax.engine.feeding import feed, raise_errors
from carat_jax.engine.request import Completion, LogitsError, Result


class Loop:
    """Takes `size` samples at a time; each request is finished after as many steps as its ids."""

    def __init__(self, size, interrupt_at=None):
        self.size, self.interrupt_at = size, interrupt_at
        self.live, self.log, self.steps = [], [], 0

    @property
    def room(self):
        return self.size - sum(request.n for request in self.live)

    @property
    def is_idle(self):
        return not self.live

    def submit(self, ids, params, is_chat):
        request = types.SimpleNamespace(left=len(ids), n=params.n, is_finished=False)
        self.live.append(request)
        self.log.append((self.steps, "submit", len(ids)))
        return request

    def step(self):
        self.steps += 1
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        for request in list(self.live):
            request.left -= 1
            if not request.left:
                self.finish(request)

    def finish(self, request):
        request.is_finished = True
        self.live.remove(request)

    def cancel(self, request):
        self.log.append((self.steps, "cancel", request.left))
        if not request.is_finished:
            self.finish(request)


def work(*lengths, n=1):
    return [([2] * length, sampling_from(SamplingParams(), n=n), False) for length in lengths]


def test_work_starts_in_its_order_as_the_queue_takes_it():
    loop, running, seen = Loop(size=2), {}, []
    for _ in feed(loop, work(3, 1, 2, 1), running):
        seen.append({index: request.is_finished for index, request in running.items()})
    assert loop.log == [
        (0, "submit", 3), (0, "submit", 1), (1, "submit", 2), (3, "submit", 1)
    ]  # fmt: skip
    assert seen == [{0: False, 1: True}, {0: False, 2: False}, {0: True, 2: True}, {3: True}]
    assert running == {}


def test_one_at_a_time():
    loop, running = Loop(size=5), {}
    for _ in feed(loop, work(2, 1), running, most=1):
        assert len(running) == 1
    assert loop.log == [(0, "submit", 2), (2, "submit", 1)]


def test_a_prompt_of_more_samples_than_there_is_room_is_tried_when_nothing_runs():
    loop, running = Loop(size=3), {}
    list(feed(loop, work(1, 1, n=4), running))
    assert loop.log == [(0, "submit", 1), (1, "submit", 1)]


def test_closing_cancels_what_is_unfinished():
    loop, running = Loop(size=2), {}
    steps = feed(loop, work(3, 5, 1), running)
    next(steps)
    steps.close()
    assert loop.log[2:] == [(1, "cancel", 2), (1, "cancel", 4)]
    assert loop.is_idle


def test_an_interrupt_cancels_too_and_leaves_what_was_under_way_to_see():
    loop, running = Loop(size=2, interrupt_at=2), {}
    steps = feed(loop, work(3, 1, 2), running)
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert sorted(running) == [0, 2]
    assert all(request.is_finished for request in running.values())


def test_errors_are_raised_with_every_result():
    def result(error):
        output = Completion("", (), "error" if error else "stop", 0, 0, error=error)
        return Result((2,), (output,), None, None)

    raise_errors([result(""), result("")])
    results = [result(""), result("position 7 is NaN"), result("later")]
    with pytest.raises(LogitsError, match="position 7 is NaN") as error:
        raise_errors(results)
    assert error.value.results == results
