"""What a released slot still holds, and who may continue from it.

Releasing a slot erases nothing, so a prompt that begins with the ids a slot holds needs to prefill
only the rest: the next turn of a conversation costs its new message alone. Pure Python.

A ring keeps its window and a few rows more. Rows that rejected drafts wrote, or steps that ran
past a stop before the host saw it, lie ahead of the ids that count; each of them replaced the row
one turn of the ring before it. So a slot can be cut back to `length` positions only if nothing was
overwritten (the ring never went round), or if no more than the ring's slack was written past them.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Held:
    """What the caches of a slot hold.

    Attributes:
      ids: of the positions 0, 1, ... that were committed, and so can be continued from.
      furthest: one past the last position that was ever written since the slot was filled.
    """

    ids: tuple[int, ...] = ()
    furthest: int = 0


NOTHING = Held()


@dataclasses.dataclass(frozen=True)
class Reuse:
    """The rule of an engine's caches.

    Attributes:
      max_rollback: positions a slot may be cut back by, wherever it stands.
      capacity: positions up to which no cache overwrites anything.
    """

    max_rollback: int
    capacity: int

    def length(self, held: Held, ids: Sequence[int]) -> int:
        """Positions of `held` that a prompt can keep; its last id is always prefilled.

        It is 0 where the prompt would keep less than half of what the slot holds: a beginning that
        many prompts share must not cost another conversation its history.
        """
        same = min(_shared(held.ids, tuple(ids)), len(ids) - 1)
        is_whole = held.furthest <= self.capacity or held.furthest - same <= self.max_rollback
        return same if is_whole and 2 * same >= len(held.ids) else 0


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of the longest common beginning, by halves: slices compare at C's speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
