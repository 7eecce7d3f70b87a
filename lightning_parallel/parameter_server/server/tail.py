"""The tail of a range: answers reads, each once what it waits for is in.

The one idea: the tail holds what every replica has, so whatever it answers can never be lost. A read that may not be
answered yet is parked, and looked at again after every entry. Left out: pushes.
"""

from __future__ import annotations

from lightning_parallel.parameter_server.filters import Float32
from lightning_parallel.parameter_server.filters.codec import encode
from lightning_parallel.parameter_server.messages import Entry, Pull, Rows
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.history import Range


class Reader:
    """What a tail knows besides its range.

    Args:
        part: the range.
        rules: the job's agreement.
    """

    def __init__(self, part: Range, rules: Rules) -> None:
        self.part, self.rules = part, rules
        self.parked: dict[int, Pull] = {}
        self.subscribers: set[int] = set()
        self._told = part.clocks.minimum
        self.view = 0  # the view whose first entry the range must hold before anything is answered

    def pull(self, pull: Pull) -> list[tuple[int, Rows]]:
        """Park a read, and answer what can be answered."""
        self.parked[pull.worker] = pull
        if self.rules.consistency.eager:
            self.subscribers.add(pull.worker)
        return self.answers()

    def may_answer(self, pull: Pull) -> bool:
        """Whether a read sees all that it must: the least clock is far enough, the reader's own pushes are in, and what
        other ranges had."""
        part = self.part
        if part.view != self.view or not part.seeded or pull.worker not in part.clocks:
            return False
        enough = part.clocks.minimum >= pull.need and part.seqs[pull.worker] >= pull.own
        return enough and part.covers(pull.least)

    def answers(self) -> list[tuple[int, Rows]]:
        """The answers to all reads that may be answered now, as (worker, rows)."""
        if not self.parked:
            return []
        ready = [pull for pull in self.parked.values() if self.may_answer(pull)]
        for pull in ready:
            del self.parked[pull.worker]
        return [(pull.worker, self.rows(pull.request)) for pull in ready]

    def after(self, entry: Entry) -> list[tuple[int, Rows]]:
        """What an entry that was just applied lets the tail say."""
        for worker in entry.left:
            self.parked.pop(worker, None)
            self.subscribers.discard(worker)
        marked = [(entry.read[0], self.rows(entry.read[1]))] if entry.read else []
        return [*marked, *self.answers(), *self._news()]

    def _news(self) -> list[tuple[int, Rows]]:
        """The weights, to all who ever read them, if the least clock has moved."""
        moved, self._told = self.part.clocks.minimum > self._told, self.part.clocks.minimum
        return [(worker, self.rows(-1)) for worker in sorted(self.subscribers)] if moved else []

    def rows(self, request: int) -> Rows:
        """The range as it is now."""
        part, precision = self.part, self.rules.pull_precision
        values = part.lend() if isinstance(precision, Float32) else encode(part.weights, precision)
        return Rows(part.key, request, values, dict(part.seqs), part.clocks.copy(), part.clocks.minimum, part.left)
