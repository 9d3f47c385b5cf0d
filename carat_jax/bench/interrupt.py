"""Ctrl-C in a program that measures for minutes: never swallowed, and a clean way out."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def leave() -> NoReturn:
    """Ends the program with 130, at once.

    Python's own way out takes apart what threads that still compile are using, and may crash.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


class Interrupt:
    """Remembers Ctrl-C, which raises KeyboardInterrupt as ever; a second one ends the program.

    Python drops an exception that is raised inside a callback, such as JAX's at a garbage
    collection, and the program would go on: `check` raises it again. Listens within a `with`.
    """

    def __init__(self):
        self.happened = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.happened:
            leave()
        self.happened = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was a Ctrl-C."""
        if self.happened:
            raise KeyboardInterrupt
