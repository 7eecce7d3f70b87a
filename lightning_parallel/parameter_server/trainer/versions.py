"""What a worker of a parameter server notes of its reads and writes, for callbacks.

The one idea: at a read the worker notes which pushes of every worker are in; the servers note in which order pushes
came; the two together say exactly how many updates came between a read and the update made from it, whenever somebody
asks. Left out: sums and pictures (``measure/staleness.py``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_parallel.measure.staleness import Access

_KEPT = 1 << 16  # iterations that are remembered if nobody asks
Order = Mapping[int, list[tuple[int, int, int, int]]]


class Ages:
    """Counts updates in the order in which they came.

    Example:
        >>> ages = Ages()
        >>> ages.take({2: [(1, 1, 1, 0)], 3: [(2, 1, 1, 0)], 5: [(1, 2, 0, 0)], 6: [(1, 3, 1, 0)]})
        >>> ages.written(1, 3), ages.held({1: 1, 2: 1}, 1), ages.held({1: 3}, 2)
        ((1, False), 1, 2)
        >>> ages.written(1, 2), ages.written(1, 9)
        (None, None)
    """

    def __init__(self) -> None:
        self.newest = 0  # entry
        self._total = 0
        self._filled: dict[int, list[int]] = defaultdict(lambda: [0])  # worker -> its updates up to each of its pushes
        self._others: dict[tuple[int, int], tuple[int, bool]] = {}

    def take(self, order: Order) -> None:
        """Go on counting: entry -> (worker, its push, whether that held anything, whether it was dropped)."""
        for lsn in sorted(order):
            self.newest = lsn
            before = self._total
            for worker, seq, filled, dropped in order[lsn]:
                counts = self._filled[worker]
                if filled:
                    self._others[worker, seq] = (before - counts[-1], bool(dropped))
                    self._total += 1
                counts.extend([counts[-1]] * (seq + 1 - len(counts)))
                counts[-1] += filled

    def written(self, worker: int, seq: int) -> tuple[int, bool] | None:
        """Others' updates that came before a push, and whether it was dropped; None if it held nothing."""
        return self._others.get((worker, seq))

    def held(self, seqs: Mapping[int, int], reader: int) -> int:
        """Others' updates among so many pushes of each worker."""
        return sum(self._up_to(worker, seq) for worker, seq in seqs.items() if worker != reader)

    def _up_to(self, worker: int, seq: int) -> int:
        counts = self._filled[worker]
        return counts[min(seq, len(counts) - 1)]


@dataclass(frozen=True)
class _AccessNote:
    access: Access
    seqs: Mapping[int, int]  # of the read
    number: int  # the servers' number of the worker
    seq: int  # of the push made from it


@dataclass
class Versions:
    """``trainer.strategy.versions`` of a strategy whose ranks read and write versions of weights.

    Args:
        num_workers: ranks that read and write.
        staleness: the rule's bound on the gap at a read; None if it has none.
        order: asks the servers in which order pushes came, after an entry.
        everyone: gives the values of all ranks, in their order; every rank calls it.
    """

    num_workers: int
    staleness: int | None
    order: Callable[[int], Order]
    everyone: Callable[[Any], list[Any]]
    _notes: deque[_AccessNote] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _ages: Ages = field(default_factory=Ages)

    def note(self, access: Access, seqs: Mapping[int, int], number: int, seq: int) -> None:
        """Keep an iteration until somebody asks."""
        self._notes.append(_AccessNote(access, dict(seqs), number, seq))

    def take(self) -> list[Access]:
        """This worker's iterations since the last call whose updates are in by now."""
        self._ages.take(self.order(self._ages.newest))
        notes, self._notes = list(self._notes), deque(maxlen=_KEPT)
        return [self._finished(note) for note in notes]

    def _finished(self, note: _AccessNote) -> Access:
        written = self._ages.written(note.number, note.seq)
        read = self._ages.held(note.seqs, note.number)
        if written is None:
            return replace(note.access, read=read)
        return replace(note.access, read=read, written=written[0], dropped=written[1])
