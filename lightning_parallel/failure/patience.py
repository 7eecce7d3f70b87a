"""How long the watch waits for what, and which waits may last.

The one idea: this is all that a user may set about the watch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """How long the watch waits for what, in seconds; the defaults end every rank within 30 s of a failure.

    Args:
        beat_s: time between two signs of life.
        stale_s: a rank that was silent for so long is lost (stopped, or its host is gone).
        blocked_s: ranks that all wait for each other for so long are stuck.
        grace_s: time in which a rank may end by itself after a failure; then its connections are closed.
        exit_s: time after that; then the process ends.
        cause_s: how long a rank whose communication failed waits to hear why.
    """

    beat_s: float = 1.0
    stale_s: float = 12.0
    blocked_s: float = 10.0
    grace_s: float = 4.0
    exit_s: float = 8.0
    cause_s: float = 3.0


class Moving(str):
    """What is waited for while much data moves over the host, as a model's state does.

    Ranks that all wait for it are stuck only if no processor works at it: to copy takes processor time, to wait none.
    (To wait for NCCL does take some: there a wait in vain ends with the group's timeout.)
    """

    __slots__ = ()
