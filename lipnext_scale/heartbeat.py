"""A process's signs of life: whoever finishes a piece of work says so, the watchdog listens.

One for the process, so that the depths of a checkpoint need no wire to the watchdog.
"""

from dataclasses import dataclass


@dataclass
class Life:
    """beats: so far; doing: what is under way; slow: that it may rightly take long."""

    beats: int = 0
    doing: str = "the start"
    slow: bool = True


LIFE = Life()


def beat(doing: str | None = None, slow: bool = False) -> None:
    """Something was finished; if given, `doing` begins now."""
    if doing is not None:
        LIFE.doing, LIFE.slow = doing, slow
    LIFE.beats += 1
