"""One way through a stage's blocks, in a forward or in a backward: each is whole in its turn, and the next one comes.

The one idea: a walk gathers all blocks of the stage, each once, in one order that follows from the stage alone. A block
that is entered closes those before it and begins to gather the one behind it. What a copy does not call it gathers all
the same, so that the copies' gathers meet on whatever branches they are. Left out: a block that is called again when
the walk has passed it; it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning_parallel.zero.collectives import Traffic
from lightning_parallel.zero.native.gathered_bucket import GatheredBucket

Waiting = Callable[[str], AbstractContextManager[Any]]


class PrefetchOrder:
    """Opens and closes the buckets of blocks.

    Args:
        blocks: numbers of blocks, in the order of the way.
        buckets: of each block.
        traffic: counts what moves.
        waiting: a context entered while this process is blocked.
        passed: called with each block when the way goes on from it.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        buckets: Mapping[int, Sequence[GatheredBucket]],
        traffic: Traffic,
        waiting: Waiting,
        passed: Callable[[int], None] = lambda block: None,
    ) -> None:
        self._blocks, self._buckets = list(blocks), buckets
        self._traffic, self._waiting, self._passed = traffic, waiting, passed
        self._place = {block: place for place, block in enumerate(self._blocks)}
        self._at, self._left, self._begun = -1, False, 0
        self._gather_up_to(0)

    def enter(self, block: int) -> bool:
        """Make a block whole, if it lies on the way; False where the way has passed it."""
        place = self._place.get(block, self._at)
        if place < self._at or (place == self._at and self._left and block in self._place):
            return False
        while self._at < place:
            self._advance()
        return True

    def need(self, block: int) -> None:
        """Make a block whole beside those that are: it is computed again, for what lies behind it."""
        place = self._place.get(block, -1)
        self._gather_up_to(place)
        for between in range(self._at + 1, place + 1):
            self._arrive(between)

    def leave(self, block: int) -> None:
        """A forward is done with a block: free it."""
        if self._at == self._place.get(block, -2):
            self._left = True
            self._close(self._at)

    def arrive(self) -> None:
        """The block at which the way begins is whole from now on."""
        if self._at < 0 < len(self._blocks):
            self._arrive(0)

    def finish(self) -> None:
        """The end of the way: what was not called is gathered too, and all is free."""
        while self._at < len(self._blocks):
            self._advance()

    def _advance(self) -> None:
        if self._at >= 0:
            self._close(self._at)
            self._passed(self._blocks[self._at])
        self._at, self._left = self._at + 1, False
        if self._at < len(self._blocks):
            self._gather_up_to(self._at)
            self._arrive(self._at)
            self._gather_up_to(self._at + 1)

    def _gather_up_to(self, place: int) -> None:
        while self._begun <= place and self._begun < len(self._blocks):
            for bucket in self._buckets[self._blocks[self._begun]]:
                bucket.open(self._traffic)
            self._begun += 1

    def _arrive(self, place: int) -> None:
        with self._waiting("the other copies' parts of the parameters"):
            for bucket in self._buckets[self._blocks[place]]:
                bucket.arrive()

    def _close(self, place: int) -> None:
        for bucket in self._buckets[self._blocks[place]]:
            bucket.close()
