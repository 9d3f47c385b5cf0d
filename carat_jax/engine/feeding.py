"""A batch of any size through the bounded queue. No jax here."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from carat_jax.config import SamplingParams
from carat_jax.engine.request import LogitsError, Request, Result

# Prompt ids, how to sample, and whether the answer is split into thought and text.
Work = tuple[Sequence[int], SamplingParams, bool]


def feed(
    loop: Any, work: Sequence[Work], running: dict[int, Request], most: int | None = None
) -> Iterator[None]:
    """Submits work in its order, as the queue takes it, and steps until all of it is finished.

    Yields after each step. If it is closed, or a step raises, what is unfinished is cancelled.

    Args:
      loop: an `EngineLoop`.
      work: what to run; it was checked against the loop's limits.
      running: the requests under way by their index in `work`, kept here for the caller to see;
        a finished one leaves after the step in which it finished was yielded.
      most: requests side by side; None is as many as the queue takes.
    """
    waiting = deque(enumerate(work))
    try:
        while waiting or running:
            while waiting and _may_start(loop, waiting[0][1], len(running), most):
                index, (ids, params, is_chat) = waiting.popleft()
                running[index] = loop.submit(ids, params, is_chat)
            loop.step()
            yield
            for index in [i for i, request in running.items() if request.is_finished]:
                del running[index]
    finally:
        for request in running.values():
            loop.cancel(request)


def _may_start(loop: Any, work: Work, num_running: int, most: int | None) -> bool:
    if most is not None and num_running >= most:
        return False
    return loop.is_idle or work[1].n <= loop.room


def raise_errors(results: Sequence[Result]) -> None:
    """Raises `LogitsError` if any sample ended in an error."""
    for result in results:
        for output in result.outputs:
            if output.error:
                raise LogitsError(output.error, results)
