"""What an engine, or one request of it, has done so far."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Acceptance:
    """What became of drafted tokens.

    Attributes:
      num_places: draft places of a round, M.
      slot_rounds: rounds, summed over the slots that took part.
      drafted, accepted: drafts verified, and of those the ones that stood, by place in the round.
      by_drafter: the sums of both for everyone whose drafts were verified.
    """

    num_places: int = 0
    slot_rounds: int = 0
    drafted: list[int] = dataclasses.field(init=False)
    accepted: list[int] = dataclasses.field(init=False)
    by_drafter: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.drafted, self.accepted = [0] * self.num_places, [0] * self.num_places

    def count(self, num_accepted: int, num_drafts: int, drafter: str) -> None:
        """Adds one slot's round, whose drafts were those of `drafter`."""
        self.slot_rounds += 1
        if num_drafts:
            sums = self.by_drafter.setdefault(drafter, {"drafted": 0, "accepted": 0})
            sums["drafted"] += num_drafts
            sums["accepted"] += num_accepted
        for place in range(num_drafts):
            self.drafted[place] += 1
            self.accepted[place] += place < num_accepted

    @property
    def mean_length(self) -> float:
        """Tokens committed a round and slot, bonus included."""
        return 1 + sum(self.accepted) / self.slot_rounds if self.slot_rounds else 0.0


@dataclasses.dataclass
class Counters:
    """Counts since the engine's start: what their names say.

    A round is a decode step; without a drafter it commits one token a slot. `reused_tokens` are
    those of prompts that a slot held already. `restarts` are the times the device state was lost
    and built anew. Of the time spent in steps, `wait_seconds` went by waiting for the device and
    `host_seconds` are Python's own: per round they must stay below what the round takes.
    `compile_seconds` were spent compiling ahead of all steps.
    """

    acceptance: Acceptance
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefills: int = 0
    reused_tokens: int = 0
    rounds: int = 0
    restarts: int = 0
    host_seconds: float = 0.0
    wait_seconds: float = 0.0
    compile_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """All counts and the mean, by name."""
        counts = dataclasses.asdict(self)
        acceptance = counts.pop("acceptance")
        del acceptance["num_places"]
        return counts | acceptance | {"mean_accepted_length": self.acceptance.mean_length}
