"""How many tokens to draft, from what rounds have cost and how much of them stood.

A round of M drafts commits 1 + a1 + a1 a2 + ... tokens on average, where a_j is the chance that
place j stands once those before it do. Both the chances and the time of a round are measured, as
running means, and the length with the most tokens a second wins; where none pays, that is no draft
at all, until a later try does better. Pure Python, no clock of its own.
"""

import logging
from collections.abc import Sequence

# Lengths that `auto` chooses among; each is an executable.
CHOICES = (0, 1, 2, 3, 5, 7)
# Weight of the newest measurement in a running mean.
_NEWEST = 0.1
# Rounds between two tries of a length that is not the best, whose cost may have changed.
_RETRY = 64
_log = logging.getLogger(__name__)


class DraftLength:
    """Chooses among `choices`, ascending."""

    def __init__(self, choices: Sequence[int] = CHOICES):
        self._choices = tuple(choices)
        self._cost: dict[int, float] = {}
        # Optimistic at first: a place nobody tried is worth trying.
        self._stands = [0.8] * self._choices[-1]
        self._rounds = 0
        self._last: tuple[int, float] | None = None
        self._has_told = False

    def choose(self, most: int) -> int:
        """The length of the next round, of which `most` drafts could be of use."""
        useful = [m for m in self._choices if m <= most] or [self._choices[0]]
        self._rounds += 1
        for length in useful:
            if length not in self._cost:
                return length
        if self._rounds % _RETRY == 0:
            return useful[self._rounds // _RETRY % len(useful)]
        best = max(useful, key=lambda m: self.tokens(m) / self._cost[m])
        if best == 0 and len(useful) > 1:
            self._tell_once(useful[1])
        return best

    def tokens(self, length: int) -> float:
        """Tokens a round of `length` drafts is expected to commit."""
        expected, chance = 1.0, 1.0
        for place in range(length):
            chance *= self._stands[place]
            expected += chance
        return expected

    def observe_drafts(self, num_accepted: int, num_drafts: int) -> None:
        """One slot's round: places up to the first that fell were put to the test."""
        if not num_drafts:
            return
        for place in range(min(num_accepted + 1, num_drafts)):
            stood = float(place < num_accepted)
            self._stands[place] += _NEWEST * (stood - self._stands[place])
        # What was never reached is judged by the last place that was.
        for place in range(num_drafts, len(self._stands)):
            self._stands[place] = min(self._stands[place], self._stands[place - 1])

    def paused(self) -> None:
        """Something else runs before the next round: the time until it ends is not its cost."""
        self._last = None

    def ended(self, length: int, now: float) -> None:
        """A round ended; right after one of the same length, the time between is what it costs."""
        if self._last is not None and self._last[0] == length:
            self.observe_cost(length, now - self._last[1])
        self._last = length, now

    def observe_cost(self, length: int, seconds: float) -> None:
        """The time between the ends of two rounds of this length, one right after the other."""
        known = self._cost.get(length)
        self._cost[length] = seconds if known is None else known + _NEWEST * (seconds - known)

    def _tell_once(self, shortest: int) -> None:
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "decode.draft_len: auto drafts nothing for now: a round of %.3f ms without drafts "
                "beats %.3f ms with %d, of which %.2f tokens stand; tried again every %d rounds",
                *(self._cost[0] * 1e3, self._cost[shortest] * 1e3, shortest),
                *(self.tokens(shortest) - 1, _RETRY),
            )
