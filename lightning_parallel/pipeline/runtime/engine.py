"""Run one rank's actions of a schedule: the interpreter of the pipeline.

The one idea: a rank walks its list of actions. Each action is done by the executor of its stage: it waits for what it
needs, runs, hands on what it made and leaves three marks on a clock (begun, inputs there, ended). Receives of coming
actions are posted before an action runs, sends are never waited for. Left out: updates inside a schedule; one that
has them is refused at set-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_parallel.errors import raise_told
from lightning_parallel.pipeline.runtime.clock import Clock
from lightning_parallel.pipeline.runtime.joined_executor import JoinedStageExecutor
from lightning_parallel.pipeline.runtime.stage_executor import StageExecutor
from lightning_parallel.pipeline.runtime.work import Marks, StepWork
from lightning_parallel.pipeline.schedule import Action, Schedule


class Engine:
    """One rank's interpreter.

    Args:
        row: which row of a schedule this rank runs.
        executors: the stages this rank holds, by (replica, stage).
        clock: marks the moments of actions.
        fail: turns an exception inside an action into the one to raise: fail(error, action).
        receive_ahead: how many coming actions have their receives posted before an action runs.
    """

    def __init__(
        self,
        row: int,
        executors: Mapping[tuple[int, int], StageExecutor],
        clock: Clock,
        fail: Callable[[Exception, Action], BaseException],
        receive_ahead: int = 1,
    ) -> None:
        self.row, self.executors, self.clock, self.fail, self.receive_ahead = (
            row,
            dict(executors),
            clock,
            fail,
            receive_ahead,
        )
        self._results: list[Any] = []
        self._joined: dict[tuple[int, int], JoinedStageExecutor] = {}

    @staticmethod
    def refuse(schedule: Schedule) -> None:
        """Raise for what this engine does not run.

        Raises:
            ValueError: weight versions or updates; token slices beside whole sequences, with split backwards, or on
                ranks that hold several stages.
        """
        actions = [action for row in schedule.actions for action in row]
        other = [action for action in actions if action.kind == "U" or action.version is not None]
        if other:
            raise ValueError(
                f"Schedule {schedule.name!r} has the action {other[0]}. The engine runs F, B, I and W so far: leave out"
                " updates (U) and weight versions (v)."
            )
        odd = [action for action in actions if action.slice is None or action.kind not in "FB"]
        if schedule.num_slices and (odd or len(schedule.placement) != schedule.num_ranks):
            what = f"the action {odd[0]}" if odd else f"{len(schedule.placement)} stages on {schedule.num_ranks} ranks"
            raise ValueError(
                f"Schedule {schedule.name!r} has token slices and {what}. With slices the engine runs F and B of slices"
                " alone, one stage a rank."
            )

    def run(self, work: StepWork, marks: Marks) -> list[Any]:
        """Run all actions of this rank; returns what the step returned for each micro-batch (on the last stage).

        Raises:
            Exception: what `fail` makes of an exception inside an action.
        """
        row = work.schedule.actions[self.row]
        for executor in self.executors.values():
            executor.cut.windows = work.windows
            executor.clear()
        for executor in self.executors.values():
            executor.settle()
        joined = work.joined
        self._joined = {
            key: JoinedStageExecutor(executor, row, joined)
            for key, executor in self.executors.items() if joined is not None and executor.stage in joined.stages
        }  # fmt: skip
        self._results = [None] * work.schedule.num_microbatches
        marks.actions = list(row)
        last_result = max((i for i, action in enumerate(row) if self._gives_result(action)), default=None)
        self.clock.begin()
        if work.after_action is not None:
            work.after_action(-1)
        for i, action in enumerate(row):
            try:
                self._post_ahead(row[i : i + 1 + self.receive_ahead], work)
                self._run_action(action, work, marks.moments)
                if work.after_action is not None:
                    work.after_action(i)
                if i == last_result and work.after_forwards is not None:
                    work.after_forwards(self._results)
            except Exception as error:
                joint = self._joined.get((action.replica, action.stage))
                raise_told(self.fail(error, action if joint is None else joint.at or action), error)
        for executor in self.executors.values():
            executor.forget(work.training)
        return self._results

    def _executor(self, action: Action) -> StageExecutor:
        return self.executors[action.replica, action.stage]

    def _gives_result(self, action: Action) -> bool:
        return action.kind == "F" and self._executor(action).departure is None

    def _run_action(self, action: Action, work: StepWork, moments: list[Any]) -> None:
        moments.append(moments[-1] if moments else self.clock.mark())  # an action begins where the one before ended
        executor = self._executor(action)
        windows = work.windows if action.kind != "W" else None  # a product of weights needs none of them

        def ready() -> None:
            if windows is not None:
                windows.wait()
            elsewhere = windows is not None or executor.waits(action)
            moments.append(self.clock.mark() if elsewhere else moments[-1])

        if windows is not None:
            forward_first = action.kind == "F" or executor.cut.recomputes_stage(action.stage)
            windows.begin(action.stage, forward_first)  # while what the action needs is on its way
        self._do(action, executor, work, ready)
        if windows is not None:
            windows.end(action.stage)
        moments.append(self.clock.mark())

    def _do(self, action: Action, executor: StageExecutor, work: StepWork, ready: Callable[[], None]) -> None:
        joint = self._joined.get((action.replica, action.stage))
        if joint is not None:
            for microbatch, result in joint.do(action, work, ready).items():
                if executor.departure is None and result is not None:
                    self._results[microbatch] = result
        elif action.kind == "F":
            result = executor.forward(action, work, ready)
            if executor.departure is None and result is not None:
                self._results[action.microbatch] = result
        elif action.kind == "W":
            ready()
            executor.weights(action, work)
        else:
            executor.backward(action, work, ready)

    def _post_ahead(self, actions: Sequence[Action], work: StepWork) -> None:
        """Post receives in the order of the sends: none before an earlier one of its channel that is not agreed yet."""
        waiting: set[tuple[int, int, bool]] = set()
        for action in actions:
            channel = (action.replica, action.stage, action.kind == "F")
            if channel not in waiting and not self._executor(action).post(action, work):
                waiting.add(channel)
