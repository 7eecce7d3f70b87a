"""What a pipeline run tells its callbacks: the schedule, and when every action of a step ran on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_parallel.measure.lanes import CallLog, Transfer, joined
from lightning_parallel.measure.spans import Span, StepTrace
from lightning_parallel.pipeline.runtime.clock import Clock
from lightning_parallel.pipeline.runtime.work import Marks
from lightning_parallel.pipeline.schedule import Schedule

Times = list[float]
Told = tuple[Times, list[Transfer] | None]  # of one step, by a rank
_KEPT = 8  # steps whose marks wait to be read


class PipelineRecorder:
    """The measured side of a pipeline, for callbacks to read.

    Attributes:
        schedule: the schedule of a full batch.
        row_ranks: the global rank of each row of the schedule, of the first line along a tensor axis.
        row: this rank's.
        latest: the schedule of the newest training step, whose batch may have been short.
        shares: of each stage in the work, as the partition has it.
    """

    def __init__(
        self,
        schedule: Schedule,
        row_ranks: Sequence[int],
        clock: Clock,
        all_gather: Callable[[Any], list[Any]],
        shares: Sequence[float] = (),
        row: int = 0,
    ) -> None:
        self.schedule, self.row_ranks, self.row = schedule, tuple(row_ranks), row
        self.latest, self.shares = schedule, tuple(shares)
        self._clock, self._all_gather = clock, all_gather
        self._pending: deque[tuple[int, Marks]] = deque()
        self._finished: deque[tuple[int, Schedule, Times]] = deque(maxlen=_KEPT)
        self._calls: dict[int, CallLog] = {}
        self._cached: tuple[int, StepTrace | None] = (-1, None)
        self._step = 0

    def begin(self, schedule: Schedule) -> Marks:
        """Marks for the next training step."""
        self._step += 1
        self.latest = schedule
        if len(self._pending) == _KEPT:
            self._clock.forget(self._pending.popleft()[1].moments)
        marks = Marks(schedule)
        self._pending.append((self._step, marks))
        return marks

    def cancel(self) -> None:
        """The training step that began last is not one."""
        self._step -= 1
        self._clock.forget(self._pending.pop()[1].moments)

    def keep_calls(self, log: CallLog) -> None:
        """Take what this rank said to others in the newest step, for the lanes of its trace."""
        self._calls[self._step] = log

    @property
    def step(self) -> int:
        """The number of the newest training step, counted in batches."""
        return self._step

    def trace(self, newest: int | None = None) -> StepTrace | None:
        """The newest finished step before the current one, of all ranks; collective, the same on every rank.

        Args:
            newest: no later step than this one.

        Returns:
            The trace, or None as long as no such step's clocks can be read without waiting for a device.
        """
        return self._trace(self._step - 1 if newest is None else newest)

    def last_trace(self) -> StepTrace | None:
        """Like `trace`, but of the current step too if its clocks can be read: for the end of a run."""
        return self._trace(self._step)

    def _trace(self, newest: int) -> StepTrace | None:
        if self._cached[0] != newest:
            self._read()
            mine = {step: (times, self._transfers(step)) for step, _, times in self._finished if step <= newest}
            everyone = self._all_gather(mine)
            common = set.intersection(*(set(entry) for entry in everyone))
            self._cached = (newest, self._build(max(common), everyone) if common else None)
            self._calls = {step: log for step, log in self._calls.items() if step > self._step - _KEPT}
        return self._cached[1]

    def _transfers(self, step: int) -> list[Transfer] | None:
        log = self._calls.get(step)
        return None if log is None else log.transfers(self._clock.seconds_at)

    def _read(self) -> None:
        """Turn marks into seconds, oldest first, stopping at the first step that is still running on the device."""
        while self._pending:
            step, marks = self._pending[0]
            if len(marks.moments) != 3 * len(marks.actions) or not marks.actions:
                if step == self._step:
                    return
                self._pending.popleft()  # a step that failed
                continue
            times = self._clock.read(marks.moments)
            if times is None:
                return
            self._pending.popleft()
            self._finished.append((step, marks.schedule, times))

    def _build(self, step: int, everyone: list[dict[int, Told]]) -> StepTrace:
        schedule = next(schedule for number, schedule, _ in self._finished if number == step)
        rows, order = [], sorted(self.row_ranks)  # entries come in the order of global ranks
        told = [everyone[order.index(rank)][step] for rank in self.row_ranks]
        for row, (times, _) in enumerate(told):
            spans = []
            for i, action in enumerate(schedule.actions[row]):
                began, ready, ended = times[3 * i : 3 * i + 3]
                of = partial(Span, replica=action.replica, slice=action.slice)
                if ready > began and schedule.num_ranks > 1:
                    spans.append(of("recv", action.stage, action.microbatch, began, ready))
                spans.append(of(action.kind, action.stage, action.microbatch, ready, ended))
            rows.append(tuple(spans))
        said = [transfers for _, transfers in told if transfers is not None]
        return StepTrace(step, schedule, tuple(rows), joined(said) if len(said) == len(told) else ())
