"""Who runs in which slot, and what is prefilled before the next round, without jax.

The rules:
  - Samples start in the order in which they were submitted. Nobody overtakes, so nobody starves.
    The samples of one prompt start together: their prompt is prefilled once and copied.
  - Prompts are prefilled one after the other, in that order, in chunks of compiled sizes. While
    samples decode, no more than `budget` positions are prefilled between two of their rounds.
  - A prompt continues from the free slot that already holds most of it, if it keeps at least half
    of what that slot holds; else it takes the slot that has been free for longest.
  - The queue is bounded, and takes all samples of a prompt or none.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from carat_jax.engine.chunks import next_chunk
from carat_jax.engine.prefixes import NOTHING, Held, Reuse
from carat_jax.engine.request import Sample


@dataclasses.dataclass(eq=False)
class Admission:
    """Samples that continue from the same ids, with their slots; the first slot is prefilled.

    Attributes:
      samples, slots: who, and where.
      ids: what the slots must hold before the samples can decode.
      done: how many of them the first slot holds so far.
      reused: how many it held from the start.
      furthest: as in `prefixes.Held`, of the first slot.
    """

    samples: tuple[Sample, ...]
    slots: tuple[int, ...]
    ids: list[int]
    done: int = 0
    reused: int = 0
    furthest: int = 0

    @property
    def is_done(self) -> bool:
        """Whether its samples can decode."""
        return self.done == len(self.ids)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Positions to prefill next: the ids from `start`, at most `size` of them, padded to that."""

    admission: Admission
    start: int
    size: int

    @property
    def ids(self) -> list[int]:
        """Its ids."""
        return self.admission.ids[self.start : self.start + self.size]

    @property
    def is_first(self) -> bool:
        """Whether nothing of its prompt was prefilled before."""
        return self.start == self.admission.reused

    @property
    def is_last(self) -> bool:
        """Whether its samples can decode after it."""
        return self.start + self.size >= len(self.admission.ids)


class Scheduler:
    """A bounded queue in front of a fixed number of slots.

    Args:
      num_slots: samples that run at once.
      max_queue: samples that may wait.
      sizes: compiled chunk sizes, ascending.
      budget: positions, padding included, prefilled between two rounds at most.
      reuse: which slots can be continued from; None is none.
    """

    def __init__(
        self,
        num_slots: int,
        max_queue: int,
        sizes: Sequence[int],
        budget: int,
        reuse: Reuse | None = None,
    ):
        self._num_slots, self._max_queue = num_slots, max_queue
        self._sizes, self._budget, self._reuse = tuple(sizes), budget, reuse
        self._waiting: deque[Sample] = deque()
        # Free slots, the one free for longest first, with what they hold.
        self._free: dict[int, Held] = dict.fromkeys(range(num_slots), NOTHING)
        self._outside: set[int] = set()
        self.filling: deque[Admission] = deque()
        self.running: dict[int, Sample] = {}

    @property
    def num_waiting(self) -> int:
        """Samples without a slot."""
        return len(self._waiting)

    @property
    def num_filling(self) -> int:
        """Samples whose prompt is being prefilled."""
        return sum(len(admission.samples) for admission in self.filling)

    @property
    def num_free(self) -> int:
        """Slots without a sample."""
        return len(self._free)

    @property
    def is_idle(self) -> bool:
        """Whether there is no sample at all."""
        return not (self._waiting or self.filling or self.running)

    @property
    def wants_round(self) -> bool:
        """Whether a decode step would be of use to anybody."""
        return any(sample.wants_more for sample in self.running.values())

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

    def chunks(self) -> Iterator[Chunk]:
        """What to prefill before the next round; admits whoever has a slot.

        While samples decode it is at most `budget` positions, and with nobody to wait for it is
        about as much as a step may take. After the last chunk of a prompt its samples run.
        """
        left, sizes = self._budget, [size for size in self._sizes if size <= self._budget]
        if not self.wants_round:
            left, sizes = max(self._budget, self._sizes[-1]), self._sizes
        while self.admit() is not None:
            pass
        while self.filling:
            admission = self.filling[0]
            size = next_chunk(len(admission.ids) - admission.done, sizes)
            if size > left:
                return
            left -= size
            chunk = Chunk(admission, admission.done, size)
            yield chunk
            admission.done = min(chunk.start + size, len(admission.ids))
            admission.furthest = max(admission.furthest, admission.done)
            if admission.is_done:
                self.filling.popleft()
                self.running.update(zip(admission.slots, admission.samples, strict=True))

    def admit(self) -> Admission | None:
        """Gives the next samples their slots, or None.

        The waiting samples of one prompt start together: they wait for enough free slots, or for
        all slots if they are more than that.
        """
        group = self._next_group()
        if not group or len(self._free) < len(group):
            return None
        for _ in group:
            self._waiting.popleft()
        ids = group[0].known_ids
        length, slot = self._best_slot(ids)
        held = self._free.pop(slot)
        furthest = held.furthest if length else 0
        others = [self._pop_slot() for _ in group[1:]]
        admission = Admission(group, (slot, *others), ids, length, length, furthest)
        self.filling.append(admission)
        return admission

    def _best_slot(self, ids: Sequence[int]) -> tuple[int, int]:
        """How much of `ids` the best free slot holds, and that slot."""
        best, chosen = 0, next(iter(self._free))
        for slot, held in self._free.items():
            length = 0 if self._reuse is None else self._reuse.length(held, ids)
            if length > best:
                best, chosen = length, slot
        return best, chosen

    def _next_group(self) -> tuple[Sample, ...]:
        first = self._waiting[0] if self._waiting else None
        same = itertools.takewhile(
            lambda sample: sample.request is first.request and sample.ids == first.ids,
            self._waiting,
        )
        return tuple(itertools.islice(same, self._num_slots))

    def drop_finished(self) -> list[Admission]:
        """Forgets cancelled samples that do not run yet; those of them that have slots."""
        self._waiting = deque(sample for sample in self._waiting if not sample.is_finished)
        dropped = [a for a in self.filling if all(sample.is_finished for sample in a.samples)]
        self.filling = deque(a for a in self.filling if a not in dropped)
        return dropped

    def take_slot(self) -> int | None:
        """A free slot for work outside the queue; give it back with `release`."""
        if not self._free:
            return None
        self._outside.add(slot := self._pop_slot())
        return slot

    def _pop_slot(self) -> int:
        """The slot that has been free for longest."""
        slot = next(iter(self._free))
        del self._free[slot]
        return slot

    def release(self, slot: int, held: Held = NOTHING) -> None:
        """Frees a slot, and says what it still holds."""
        self.running.pop(slot, None)
        self._outside.discard(slot)
        self._free[slot] = held

    def restart(self) -> None:
        """Puts all samples that have slots back at the head of the queue: what these held is lost.

        Their order stays that in which they were submitted.
        """
        lost = [*self.running.values(), *(s for a in self.filling for s in a.samples)]
        for sample in reversed([sample for sample in lost if not sample.is_finished]):
            sample.num_dispatched = len(sample.ids)
            self._waiting.appendleft(sample)
        self.running.clear()
        self.filling.clear()
        free = (slot for slot in range(self._num_slots) if slot not in self._outside)
        self._free = dict.fromkeys(free, NOTHING)
