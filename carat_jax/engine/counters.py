"""What an engine, or one request of it, has done so far."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Counters:
    """Counts since the start.

    Attributes:
      num_places: draft places of a round, M.
      requests, prompt_tokens, generated_tokens, prefills: what their names say.
      rounds: decode steps; without a drafter each commits one token a slot.
      slot_rounds: rounds summed over the slots that took part.
      restarts: times the device state was lost and built anew.
      drafted, accepted: drafts verified, and of those the ones that stood, by place in the round.
    """

    num_places: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefills: int = 0
    rounds: int = 0
    slot_rounds: int = 0
    restarts: int = 0
    drafted: list[int] = dataclasses.field(init=False)
    accepted: list[int] = dataclasses.field(init=False)

    def __post_init__(self):
        self.drafted, self.accepted = [0] * self.num_places, [0] * self.num_places

    def count(self, num_accepted: int, num_drafts: int) -> None:
        """Adds one slot's round."""
        self.slot_rounds += 1
        for place in range(num_drafts):
            self.drafted[place] += 1
            self.accepted[place] += place < num_accepted

    @property
    def mean_accepted_length(self) -> float:
        """Tokens committed a round and slot, bonus included."""
        return 1 + sum(self.accepted) / self.slot_rounds if self.slot_rounds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All counts and the mean, by name."""
        counts = dataclasses.asdict(self)
        del counts["num_places"]
        return counts | {"mean_accepted_length": self.mean_accepted_length}
