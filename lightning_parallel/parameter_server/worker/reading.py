"""One pull of all ranges, so that it holds the same pushes in each.

    ask       every tail answers by itself; if all hold the same pushes, that is the answer
    catch up  else those that lack what others have are asked again, to answer once they have it; a few times
    hold      else the heads are held, the first range's before the others', so that two readers never wait in a circle
    at        the least version that has all they have is named; each head lets in what is missing and marks the place
              in its history, where the tail answers

The one idea: what one range has, every other will get, since a worker pushes to all; so waiting a moment is mostly
enough, and standing still a moment always. A worker that died while it pushed is the exception: its last push may be in
some ranges only, and the result says so (``torn``). Left out: sending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.filters import decode
from lightning_parallel.parameter_server.layout import Layout

Shown = tuple[Tensor, dict[int, m.Rows]]  # the whole vector, and of each range what it holds, its values a slice


@dataclass(frozen=True)
class Result:
    """What a pull returns.

    Args:
        vector: shape (size,), the weights.
        version: pushes in them.
        seqs: worker -> how many of its pushes are in them.
        minimum: the least clock of all workers, in every range.
        torn: workers that died in a push which only some of the ranges have.
        versions: pushes in each range; all the same, unless torn or asked for without one version.
    """

    vector: Tensor
    version: int
    seqs: m.Seqs
    minimum: int
    torn: tuple[int, ...]
    versions: tuple[int, ...]


CATCH_UPS = 3


@dataclass
class Reading:
    """The state of a pull.

    Args:
        worker: the reader.
        request: number of the pull.
        keys: its ranges.
        need: the least clock that it must see.
        own: the reader's own push that it must see.
        memory: where answers are received that come in one piece.
    """

    worker: int
    request: int
    keys: tuple[int, ...]
    need: int
    own: int
    memory: Callable[[int], Tensor] = torch.empty
    rows: dict[int, m.Rows] = field(default_factory=dict)
    held: dict[int, m.Held] = field(default_factory=dict)
    least: m.Seqs = field(default_factory=dict)  # what every range must have, since one had it
    tries: int = 0  # times at which those that lacked something were asked again
    holds: bool = False  # whether the heads are asked to stand still
    slices: dict[int, Tensor] = field(default_factory=dict)  # of one vector, into which answers are received
    vector: Tensor | None = None

    def on_rows(self, rows: m.Rows) -> bool:
        """Take an answer; whether all are there."""
        if rows.request == self.request:
            self.rows[rows.key] = rows
        return len(self.rows) == len(self.keys)

    def suits(self, rows: m.Rows) -> bool:
        """Whether a range holds what the reader must see."""
        return rows.minimum >= self.need and rows.seqs.get(self.worker, 0) >= self.own

    def place(self, rows: m.Rows, layout: Layout) -> Tensor | None:
        """Memory for the values of an answer, given without them: its slice of the whole; each slice is given once."""
        if rows.request != self.request or rows.key not in self.keys or rows.key in self.slices:
            return None
        if self.vector is None:
            self.vector = self.memory(layout.size)
        start, end = layout.bounds[rows.key]
        self.slices[rows.key] = self.vector[start:end]
        return self.slices[rows.key]

    def _join(self, layout: Layout) -> Tensor:
        """All values in order, where they are if every range's came into its slice."""
        rows = self.rows
        if self.vector is not None and all(rows[key].values is self.slices.get(key) for key in self.keys):
            return self.vector
        return layout.join({key: decode(rows[key].values) for key in self.keys})

    def agrees(self, one_version: bool) -> bool:
        """Whether all answers hold the same pushes, but for workers that are gone."""
        differing = _differing(self.rows) if one_version else []
        return not differing or self._left.issuperset(differing)

    def again(self, request: int) -> list[tuple[int, m.Pull | m.Hold | m.At]]:
        """The answers disagree: the question to those that lack something, or, after a few times, to stand still."""
        if self.tries == CATCH_UPS:
            return self.hold(request)
        self.tries, self.request = self.tries + 1, request
        self.least = _union(rows.seqs for rows in self.rows.values())
        gone = self._left
        wanted = {worker: seq for worker, seq in self.least.items() if worker not in gone}
        self.rows = {key: rows for key, rows in self.rows.items() if wanted.items() <= rows.seqs.items()}
        return self.questions()

    def hold(self, request: int) -> list[tuple[int, m.Pull | m.Hold | m.At]]:
        """Start over with the heads held: the question to the first of them."""
        self.request, self.rows, self.held, self.holds = request, {}, {}, True
        self.slices, self.vector = {}, None  # answers to what was asked before may still come into the old one
        return self.questions()

    def on_held(self, held: m.Held) -> list[tuple[int, m.Pull | m.Hold | m.At]]:
        """A head stands still: the question to the next, or to all at which version to answer."""
        if held.request != self.request or held.key in self.held:
            return []
        self.held[held.key] = held
        return [] if 1 < len(self.held) < len(self.keys) else self.questions()

    def questions(self) -> list[tuple[int, m.Pull | m.Hold | m.At]]:
        """What is asked now, and of which range."""
        missing = [key for key in self.keys if key not in self.rows]
        if not self.holds:
            return [(key, m.Pull(key, self.worker, self.request, self.need, self.own, self.least)) for key in missing]
        if len(self.held) < len(self.keys):
            wanted = [key for key in self.keys if key not in self.held] if self.held else self.keys[:1]
            return [(key, m.Hold(key, self.worker, self.request)) for key in wanted]
        return [(key, m.At(key, self.worker, self.request, self.target)) for key in missing]

    @property
    def target(self) -> m.Seqs:
        """The least version that has all pushes which any range has."""
        return _union(held.seqs for held in self.held.values())

    @property
    def _left(self) -> set[int]:
        return {worker for rows in self.rows.values() for worker in rows.left}

    def result(self, layout: Layout) -> Result:
        """The answer, once all rows are there."""
        rows = self.rows
        seqs = _union(part.seqs for part in rows.values())
        vector = self._join(layout)
        versions = tuple(sum(rows[key].seqs.values()) for key in sorted(rows))
        minimum = min(part.minimum for part in rows.values())
        differing = _differing(rows)
        torn = tuple(sorted(self._left.intersection(differing))) if differing else ()
        return Result(vector, sum(seqs.values()), seqs, minimum, torn, versions)


def _union(versions: Iterable[m.Seqs]) -> m.Seqs:
    """The least version that has all pushes of some."""
    union: m.Seqs = {}
    for seqs in versions:
        union |= {worker: max(seq, union.get(worker, 0)) for worker, seq in seqs.items()}
    return union


def _differing(rows: dict[int, m.Rows]) -> list[int]:
    first, *others = rows.values()
    if all(part.seqs == first.seqs for part in others):
        return []
    workers = {worker for part in rows.values() for worker in part.seqs}
    return [w for w in workers if len({part.seqs.get(w, 0) for part in rows.values()}) > 1]
