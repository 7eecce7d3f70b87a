"""Who of a run is there, who waits, and for what.

The one idea: whoever waits for the others says what for and gives a value; once all who are still there wait for the
same, each is given all values. Whoever begins late is waited for where new ones are let in, and nowhere before. Rows of
the dead are not waited for by those who have ended their epoch otherwise. Left out: connections
(``parameter_server/trainer/coordination/run_coordinator.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_parallel.parameter_server.trainer.coordination.run_coordinator_client import JOIN, ROWS

SURE_S = 4.0  # what a member of an island joined before it came here has long ended then


@dataclass
class Rendezvous:
    """Who is there, who waits, for what and with which value.

    Args:
        present: ranks that are awaited.

    Example:
        >>> meeting = Rendezvous({0, 1, 2})
        >>> meeting.arrive(0, "a", "x"), meeting.arrive(2, "a", "z")
        (None, None)
        >>> meeting.leave(1)
        {0: 'x', 2: 'z'}
        >>> meeting.arrive(0, "b", None), meeting.circle()
        (None, None)
        >>> meeting.arrive(2, "c", None), meeting.circle()
        (None, 'rank 0 waits for b; rank 2 waits for c')

    Attributes:
        met: what was waited for by those whose values were given last.
    """

    present: set[int]
    waiting: dict[int, tuple[str, Any]] = field(default_factory=dict)
    coming: set[int] = field(default_factory=set)  # are to be let in
    met: str = ""
    come: dict[int, Any] = field(default_factory=dict)  # of those, who is there; their values
    _stuck: dict[int, tuple[int, float]] = field(default_factory=dict)  # in which wait, and since when a mate is here

    def arrive(self, rank: int, what: str, value: Any) -> dict[int, Any] | None:
        """A rank waits; the values of all, if it was the last of them."""
        if rank in self.coming:
            self.come[rank] = value
        else:
            self.waiting[rank] = (what, value)
        return self._take()

    def leave(self, rank: int) -> dict[int, Any] | None:
        """A rank is gone; the values of all others, if it was what they waited for."""
        self.present.discard(rank)
        self.coming.discard(rank)
        self.waiting.pop(rank, None)
        self.come.pop(rank, None)
        return self._take()

    def _take(self) -> dict[int, Any] | None:
        kinds = {what for what, _ in self.waiting.values()}
        if not kinds or self.waiting.keys() != self.present or (len(kinds) > 1 and ROWS not in kinds):
            return None
        self.met = ROWS if ROWS in kinds else kinds.pop()
        if self.met == JOIN and self.come.keys() != self.coming:
            return None
        values = {rank: value for rank, (what, value) in self.waiting.items() if what == self.met}
        self.waiting = {rank: other for rank, other in self.waiting.items() if rank not in values}
        if self.met == JOIN:
            values |= self.come
            self.present |= self.coming
            self.coming, self.come = set(), {}
        return dict(sorted(values.items()))

    def circle(self) -> str | None:
        """What everybody waits for, where nobody can go on."""
        if self.waiting.keys() != self.present or len({what for what, _ in self.waiting.values()}) < 2:
            return None
        return "; ".join(f"rank {rank} waits for {self.waiting[rank][0]}" for rank in sorted(self.waiting))

    def circle_in_island(self, rank: int, wait: int, island: Iterable[int]) -> str | None:
        """What members of an island wait for, where one waits for another that will not come, and has for a while.

        Args:
            rank: waits for its island's other members.
            wait: the how many-th time; it says so again and again.
            island: the ranks of its island.
        """
        here = [mate for mate in island if mate in self.waiting]
        since = self._stuck.get(rank, (None, 0.0))
        if not here or since[0] != wait:
            self._stuck[rank] = (wait if here else -1, time.monotonic())
            return None
        if time.monotonic() - since[1] < SURE_S:
            return None
        others = "; ".join(f"rank {mate} waits for {self.waiting[mate][0]}" for mate in here)
        return f"rank {rank} is in a step, which its island makes together (all members need as many); {others}"
