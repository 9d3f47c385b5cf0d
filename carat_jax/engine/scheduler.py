"""Who runs in which slot: first come, first served, without jax.

The samples of one prompt form one admission, so that their prompt is prefilled once and copied.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable

from carat_jax.engine.request import Sample


@dataclasses.dataclass(frozen=True)
class Admission:
    """Samples that start now, with their slots. All continue from the same ids."""

    samples: tuple[Sample, ...]
    slots: tuple[int, ...]


class Scheduler:
    """A bounded queue in front of a fixed number of slots."""

    def __init__(self, num_slots: int, max_queue: int):
        self._num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._max_queue = max_queue
        self._waiting: deque[Sample] = deque()
        self.running: dict[int, Sample] = {}

    @property
    def num_waiting(self) -> int:
        """Samples without a slot."""
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        """Slots without a sample."""
        return len(self._free)

    def room(self) -> int:
        """Samples that may still be submitted."""
        return self._max_queue + len(self._free) - len(self._waiting)

    def submit(self, samples: Iterable[Sample]) -> None:
        """Queues samples that are not finished.

        Raises:
          ValueError: the queue cannot take them all; none is queued.
        """
        samples = [sample for sample in samples if not sample.is_finished]
        if len(samples) > self.room():
            raise ValueError(
                f"engine.max_queue={self._max_queue}: {len(self._waiting)} samples are waiting, "
                f"{len(samples)} more do not fit; wait for some to finish or raise it"
            )
        self._waiting.extend(samples)

    def admit(self) -> Admission | None:
        """Takes the next samples that can start, or None.

        The waiting samples of one prompt start together: they wait for enough free slots, or for
        all slots if they are more than that.
        """
        group = self._next_group()
        if not group or len(self._free) < len(group):
            return None
        for _ in group:
            self._waiting.popleft()
        slots = tuple(self._free.pop() for _ in group)
        self.running.update(zip(slots, group, strict=True))
        return Admission(group, slots)

    def _next_group(self) -> tuple[Sample, ...]:
        first = self._waiting[0] if self._waiting else None
        same = itertools.takewhile(
            lambda sample: sample.request is first.request and sample.ids == first.ids,
            self._waiting,
        )
        return tuple(itertools.islice(same, self._num_slots))

    def drop_finished(self) -> None:
        """Forgets cancelled samples that were still waiting."""
        self._waiting = deque(sample for sample in self._waiting if not sample.is_finished)

    def take_slot(self) -> int | None:
        """A free slot for work outside the queue; give it back with `release`."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """Frees a slot."""
        self.running.pop(slot, None)
        self._free.append(slot)

    def restart(self) -> None:
        """Puts the running samples back at the head of the queue: what their slots held is lost."""
        lost = sorted(self.running, reverse=True)
        for slot in lost:
            sample = self.running[slot]
            if not sample.is_finished:
                sample.num_dispatched = len(sample.ids)
                self._waiting.appendleft(sample)
            self.release(slot)
