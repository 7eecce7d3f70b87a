"""Reductions of a stage's gradients that begin when its last backward or W is done, while other stages still work.

The one idea: buckets leave in one order on all copies, from the last stage to the first, each as soon as it and all
before it are final; nobody waits for them before the step's end. What is added to a gradient later is reduced again
then. Left out: parameters that several ranks of a pipeline hold, whose gradients are summed over these first; and what
leaves while an action runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_parallel.pipeline.parameters import Entry
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.zero.bucket import Bucket
from lightning_parallel.zero.reducer import Reducer


class EarlyReduction:
    """Sends buckets ahead of the step's end.

    Args:
        reducer: has the buckets, and sends.
        entry_of: what a bucket's parameters have in common.
        row: of the schedule, this rank's.
    """

    def __init__(self, reducer: Reducer, entry_of: Callable[[Bucket], Entry], row: int) -> None:
        self._reducer, self._entry_of, self._row = reducer, entry_of, row

    @property
    def order(self) -> list[int]:
        """The numbers of all buckets in the order in which they are reduced, early or not."""
        entries = [self._entry_of(bucket) for bucket in self._reducer.buckets]
        return sorted(range(len(entries)), key=lambda n: (len(entries[n].rows) > 1, [-s for s in entries[n].stages]))

    def begin(self, schedule: Schedule) -> Callable[[int], None]:
        """A step begins; what it returns is called after each of this rank's actions, by number, and with -1 first."""
        coming = self._finals(schedule)

        @torch.no_grad()
        def after(action: int) -> None:
            while coming and coming[0][1] <= action:
                self._reducer.send(coming.pop(0)[0])

        return after

    def _finals(self, schedule: Schedule) -> list[tuple[int, int]]:
        """For each bucket that may leave early, in order, the action with which its gradients are final."""
        buckets: Sequence[Bucket] = self._reducer.buckets
        found = []
        for number in self.order:
            entry = self._entry_of(buckets[number])
            if len(entry.rows) == 1 and buckets[number].expected:
                actions = enumerate(schedule.actions[self._row])
                of = [i for i, action in actions if action.kind in "BIW" and action.stage in entry.stages]
                found.append((number, max(of, default=-1)))
        return found
