"""Who trains on which rows of an epoch, and on those that a dead worker left.

The one idea: an epoch is dealt among the workers that are there when the first of them begins it, and stays dealt so. A
``DealPart`` says in a few numbers which batches of whose share are meant; every worker can tell the rows from it. Of
what a dead worker was given, all that the servers do not have is dealt anew among those who are left. Left out: rows
(``dealt_rows.py``), who is there (``parameter_server/trainer/coordination/run_coordinator.py``).
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

_KEPT = 64  # notes of pushes; fewer are under way
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class DealPart:
    """Batches of one worker's share of an epoch.

    Args:
        epoch: which.
        members: ranks among whom it is dealt.
        place: of the worker in ``members`` whose share it is.
        turn: the how many-th time that epochs of these numbers are gone through, as a search for a learning rate does.
        cuts: (first, part, parts), one after the other: from the batch ``first`` on, every one of ``parts`` workers has
            every so many-th, and ``part`` of them is meant. Parts are of one length: some batches are had twice.

    Example:
        >>> DealPart(0, (0, 1, 2), 1, ((2, 0, 2),)).of(["a", "b", "c", "d", "e"])
        ['c', 'e']
        >>> DealPart(0, (0, 1, 2), 1, ((2, 1, 2),)).of(["a", "b", "c", "d", "e"])
        ['d', 'c']
    """

    epoch: int
    members: tuple[int, ...]
    place: int
    cuts: tuple[tuple[int, int, int], ...] = ()
    turn: int = field(default=0, repr=False)

    def of(self, share: Sequence[Batch]) -> list[Batch]:
        """The batches that are meant, of all of the share's."""
        batches = list(share)
        for first, part, parts in self.cuts:
            rest = batches[first:]
            length = -(-len(rest) // parts)
            batches = list(itertools.islice(itertools.cycle(rest), part, length * parts, parts))
        return batches

    def dealt(self, first: int, parts: int) -> list[DealPart]:
        """What is left of it from a batch on, for so many workers."""
        return [replace(self, cuts=(*self.cuts, (first, part, parts))) for part in range(parts)]


class Deals:
    """What every worker was given, and how far each has come.

    Example:
        >>> deals = Deals()
        >>> deals.begin(0, 0, {0, 1, 2}) == DealPart(0, (0, 1, 2), 0)
        True
        >>> deals.note(1, seq=1, part=0, batches=1), deals.note(1, seq=2, part=0, batches=2)
        (None, None)
        >>> deals.lost(1, acknowledged=1, heirs={0, 2})
        >>> deals.begin(0, 0, {0, 2}, turn=1) == DealPart(0, (0, 2), 0, turn=1)
        True
        >>> deals.more(0), deals.more(2) == [DealPart(0, (0, 1, 2), 1, ((1, 1, 2),))]
        ([DealPart(epoch=0, members=(0, 1, 2), place=1, cuts=((1, 0, 2),))], True)
    """

    def __init__(self) -> None:
        self.members: dict[tuple[int, int], tuple[int, ...]] = {}  # of every epoch that was begun, by turn and number
        self._given: dict[int, list[DealPart]] = defaultdict(list)  # not begun yet
        self._begun: dict[int, list[DealPart]] = defaultdict(list)
        self._notes: dict[int, deque[tuple[int, int, int]]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def begin(self, rank: int, epoch: int, present: Collection[int], turn: int = 0) -> DealPart | None:
        """A worker begins an epoch: its share. None for one that is not among those who have it."""
        if (turn, epoch) not in self.members:
            self.members[turn, epoch] = members = tuple(sorted(present))
            for place, member in enumerate(members):
                self._given[member].append(DealPart(epoch, members, place, turn=turn))
        for part in self._given[rank]:
            if (part.turn, part.epoch) == (turn, epoch) and not part.cuts:
                return self._begin(rank, part)
        return None

    def more(self, rank: int) -> list[DealPart]:
        """A worker has come to the end of its share: what dead ones left for it."""
        return [self._begin(rank, part) for part in list(self._given[rank]) if part.cuts]

    def _begin(self, rank: int, part: DealPart) -> DealPart:
        self._given[rank].remove(part)
        self._begun[rank].append(part)
        return part

    def note(self, rank: int, seq: int, part: int, batches: int) -> None:
        """With a push a worker will have trained on so many batches of a part, counted as it began them."""
        self._notes[rank].append((seq, part, batches))

    def lost(self, rank: int, acknowledged: int, heirs: Collection[int]) -> None:
        """A worker is gone, and servers have its pushes up to a number: deal what is left of what it was given."""
        notes = [note for note in self._notes.pop(rank, ()) if note[0] <= acknowledged]
        _, begun, batches = notes[-1] if notes else (0, 0, 0)
        rest = [*self._begun.pop(rank, [])[begun:], *self._given.pop(rank, [])]
        for index, part in enumerate(rest):
            for heir, own in zip(sorted(heirs), part.dealt(0 if index else batches, len(heirs)), strict=True):
                self._given[heir].append(own)
