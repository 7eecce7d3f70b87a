"""Reductions of a stage's gradients that begin while its last backward or W still runs.

The one idea: a gradient is final when its stage's last action has made it, however much of that action is to come.
Buckets leave in one order on all copies, from the last stage to the first, each as soon as it and all before it are
final. Few are on their way at a time, for what is sent is memory too; but nobody waits within a backward that gathers
blocks, before it has come past the block: another copy may be on a branch on which no hook says that gradients are
there. What is added to a gradient later is reduced again at the step's end. Left out: parameters that several ranks of
a pipeline hold, whose gradients are summed over these first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_parallel.pipeline.gradients.early_sums import Round, last_action
from lightning_parallel.pipeline.parameters.table import ParameterEntry
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.zero.native.bucket import Bucket
from lightning_parallel.zero.reducer import Reducer


class EarlyReduction:
    """Sends buckets ahead of the step's end.

    Args:
        reducer: has the buckets, and sends.
        entry_of: what a bucket's parameters have in common.
        row: of the schedule, this rank's.
        may_wait: whether this process may wait for other copies while an action runs.
        comes_unseen: whether some of a parameter's gradient is made where no hook is called, or after an action; it
            waits for an action's end.
    """

    def __init__(
        self,
        reducer: Reducer,
        entry_of: Callable[[Bucket], ParameterEntry],
        row: int,
        may_wait: Callable[[], bool],
        comes_unseen: Callable[[nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        self._reducer, self._entry_of, self._row, self._comes_unseen = reducer, entry_of, row, comes_unseen
        self._may_wait, self._number = may_wait, dict[nn.Parameter, int]()

    @property
    def order(self) -> list[int]:
        """The numbers of all buckets in the order in which they are reduced, early or not."""
        entries = [self._entry_of(bucket) for bucket in self._reducer.buckets]
        return sorted(range(len(entries)), key=lambda n: (len(entries[n].rows) > 1, [-s for s in entries[n].stages]))

    def begin(self, schedule: Schedule) -> tuple[Round, Callable[[int], None]]:
        """A step begins: what is to be told of its backwards, and what to call after each of this rank's actions, by
        number, and with -1 first."""
        buckets, finals = self._plan(schedule)
        self._number = {bucket[0]: number for number, bucket in buckets.items()}
        going = Round(schedule.actions[self._row], finals, list(buckets.values()), self)

        def after(action: int) -> None:
            going.after(action)
            self._reducer.settle()

        return going, after

    def may_be_early(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's hooks are called with all of its gradient."""
        return not self._comes_unseen(parameter)

    may_leave_in_weights = may_be_early

    @torch.no_grad()
    def send(self, bucket: list[nn.Parameter]) -> Any:
        """Begin to reduce a bucket, given by those of its parameters that train."""
        self._reducer.send(self._number[bucket[0]])
        if self._may_wait():
            self._reducer.settle()

    def _plan(self, schedule: Schedule) -> tuple[dict[int, list[nn.Parameter]], dict[int, list[nn.Parameter]]]:
        """The parameters that train of each bucket that may leave early, in order, and for each of this row's actions
        the parameters whose gradients are final with it; -1 where none makes any."""
        buckets: dict[int, list[nn.Parameter]] = {}
        finals: dict[int, list[nn.Parameter]] = {}
        for number in self.order:
            entry = self._entry_of(self._reducer.buckets[number])
            held = [p for p in self._reducer.buckets[number].parameters if p.requires_grad]
            if len(entry.rows) == 1 and held:
                buckets[number] = held
                finals.setdefault(last_action(schedule, self._row, entry.stages), []).extend(held)
        return buckets, finals
