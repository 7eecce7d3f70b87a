"""Run one rank's actions of a schedule: the interpreter of the pipeline.

The one idea: a rank walks its list of actions. Each action waits for what it needs, runs, hands on what it made and
leaves three marks on a clock (begun, inputs there, ended). Receives of coming actions are posted before an action runs,
sends are never waited for, a micro-batch's activations are dropped with its backward. Left out: several stages on one
rank, split backwards (I, W), updates inside a schedule; a schedule that has them is refused at construction.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline.boundary import Arrival, Contract, Departure, Inbox
from lightning_parallel.pipeline.channel import Receipt
from lightning_parallel.pipeline.clock import Clock
from lightning_parallel.pipeline.cut import Cut
from lightning_parallel.pipeline.phantom import Leaf
from lightning_parallel.pipeline.schedule import Action, Schedule
from lightning_parallel.pipeline.stage import Place, StageRun, UnitOutputs


@dataclass
class StepWork:
    """What one step of the Trainer asks of a rank.

    Args:
        schedule: what every rank does.
        steps: for each micro-batch, the user's step on it.
        signatures: for each micro-batch, what decides the shapes in it; equal on all ranks.
        batch: number of the batch, for the random streams.
        loss_of: the loss in what the step returned.
        scales: for each micro-batch, what its loss is multiplied with before its backward; empty in evaluation.
        after_forwards: called with the results once this rank's last forward was launched, or None.
    """

    schedule: Schedule
    steps: Sequence[Callable[[], Any]]
    signatures: Sequence[Hashable]
    batch: int
    loss_of: Callable[[Any], Tensor] | None = None
    scales: Sequence[Tensor] = ()
    after_forwards: Callable[[list[Any]], None] | None = None


@dataclass
class Marks:
    """The marks of one step: for every action (began, inputs there, ended)."""

    schedule: Schedule
    actions: list[Action] = field(default_factory=list)
    moments: list[Any] = field(default_factory=list)


@dataclass
class _Held:
    """A forward that waits for its backward."""

    run: StageRun
    inbox: Inbox | None = None
    arrival: Contract | None = None
    departure: Contract | None = None
    edges: dict[Place, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    again: bool = False  # the forward has to run again before its backward

    def roots(self) -> Sequence[Any]:
        """Where the backward begins."""
        return [self.loss] if self.departure is None else [self.edges[p] for p in self.departure.with_gradient()]


class Engine:
    """One rank's interpreter.

    Args:
        cut: the model, cut.
        stage: the stage this rank runs.
        arrival: the boundary to the stage before, None on the first.
        departure: the boundary to the stage after, None on the last.
        clock: marks the moments of actions.
        fail: turns an exception inside an action into the one to raise: fail(error, action).
        receive_ahead: how many coming actions have their receives posted before an action runs.

    Attributes:
        keep_received: keep copies in `received` of what comes in for each micro-batch of a step (for `check_loss`).
    """

    def __init__(
        self,
        cut: Cut,
        stage: int,
        arrival: Arrival | None,
        departure: Departure | None,
        clock: Clock,
        fail: Callable[[Exception, Action], Exception],
        receive_ahead: int = 1,
    ) -> None:
        self.cut, self.stage, self.arrival, self.departure = cut, stage, arrival, departure
        self.clock, self.fail, self.receive_ahead = clock, fail, receive_ahead
        self.keep_received = False
        self.received: dict[int, tuple[dict[Place, Tensor], UnitOutputs]] = {}
        self._held: dict[int, _Held] = {}
        self._posted: dict[Action, Any] = {}
        self._results: list[Any] = []

    @staticmethod
    def refuse(schedule: Schedule) -> None:
        """Raise for what this engine does not run.

        Raises:
            ValueError: several stages or replicas a rank, or actions other than F and B.
        """
        if schedule.num_stages != schedule.num_ranks or len(schedule.placement) != schedule.num_ranks:
            raise ValueError(
                f"Schedule {schedule.name!r} places {len(schedule.placement)} stages on {schedule.num_ranks} ranks. The"
                " engine runs one stage a rank so far: use naive, gpipe, 1f1b or a schedule with as many stages as"
                " ranks."
            )
        other = {action.kind for row in schedule.actions for action in row} - {"F", "B"}
        if other:
            raise ValueError(f"Schedule {schedule.name!r} has actions {sorted(other)}. The engine runs F and B so far.")

    def run(self, work: StepWork, marks: Marks) -> list[Any]:
        """Run all actions of this rank; returns what the step returned for each micro-batch (on the last stage).

        Raises:
            Exception: what `fail` makes of an exception inside an action.
        """
        row = work.schedule.actions[work.schedule.placement[0, self.stage]]
        self._held.clear()
        self._posted.clear()
        self.received.clear()
        for boundary in (self.departure, self.arrival):
            if boundary is not None:
                boundary.settle()
        self._results = [None] * work.schedule.num_microbatches
        marks.actions = list(row)
        last_forward = max(i for i, action in enumerate(row) if action.kind == "F")
        self.clock.begin()
        for i, action in enumerate(row):
            try:
                self._post_ahead(row[i : i + 1 + self.receive_ahead], work)
                self._run_action(action, work, marks.moments)
                if i == last_forward and work.after_forwards is not None:
                    work.after_forwards(self._results)
            except Exception as error:
                failure = self.fail(error, action)
                if failure is error:
                    raise
                raise failure from failure.__cause__
        self._held.clear()
        return self._results

    def _run_action(self, action: Action, work: StepWork, moments: list[Any]) -> None:
        moments.append(moments[-1] if moments else self.clock.mark())  # an action begins where the one before ended
        act = self._forward if action.kind == "F" else self._backward
        act(action, work, moments)
        moments.append(self.clock.mark())

    def _post_ahead(self, actions: Sequence[Action], work: StepWork) -> None:
        """Post receives in the order of the sends: none before an earlier one of its channel that is not agreed yet."""
        waiting: set[str] = set()
        for action in actions:
            if action.kind not in waiting:
                self._post(action, work)
                if action not in self._posted:
                    waiting.add(action.kind)

    def _post(self, action: Action, work: StepWork) -> None:
        """Post an action's receive if what it brings has been agreed; if not, the action itself will ask."""
        if action in self._posted:
            return
        if action.kind == "F" and self.arrival is not None:
            signature = work.signatures[action.microbatch]
            if self.arrival.knows(signature):
                self._posted[action] = self.arrival.post(signature, self._waits_for(action, self.stage - 1))
        elif action.kind == "B" and action.microbatch in self._held:
            contract = self._held[action.microbatch].departure
            if contract is not None and contract.needed is not None:
                assert self.departure is not None
                self._posted[action] = self.departure.post_gradients(contract, self._waits_for(action, self.stage + 1))

    def _waits_for(self, action: Action, stage: int) -> str:
        return f"{action.kind}{action.microbatch} of stage {stage}"

    def _forward(self, action: Action, work: StepWork, moments: list[Any]) -> None:
        m, training = action.microbatch, work.loss_of is not None
        contract, inbox = self._receive(action, work, training)
        moments.append(moments[-1] if self.arrival is None else self.clock.mark())
        signature = work.signatures[m]
        learn = self.departure is not None and not self.departure.knows(signature)
        key = self.cut.streams.begin(work.batch, m)
        values, units = inbox.values if inbox else {}, contract.units if contract else {}
        if self.keep_received:
            self.received[m] = ({position: value.detach().clone() for position, value in values.items()}, units)
        twice = self.cut.recompute_stage and training and not learn
        if twice:  # the first run may write into what came in
            values = {position: value.detach().clone() for position, value in values.items()}
        with torch.no_grad() if twice else nullcontext():
            run = StageRun(self.cut, self.stage, m, key, values, units, learn, keep=self._to_keep(signature))
            result = run.forward(work.steps[m])
        held = _Held(run, inbox, contract)
        if self.departure is not None:
            held.departure = self.departure.send(run, signature)
        if self.arrival is not None and contract is not None:
            self.arrival.answer(run, contract, held.departure.results() if held.departure is not None else ())
        if held.departure is not None:
            if twice:
                run.outputs, held.again = None, True
            else:
                self._keep_edges(held)
        else:
            held.loss = work.loss_of(result) if work.loss_of is not None else None
            self._results[m] = tree_map_only(Tensor, Tensor.detach, result)
        if training:
            self._held[m] = held

    def _receive(self, action: Action, work: StepWork, training: bool) -> tuple[Contract | None, Inbox | None]:
        if self.arrival is None:
            return None, None
        posted: tuple[Contract, Receipt] | None = self._posted.pop(action, None)
        if posted is None:
            signature = work.signatures[action.microbatch]
            posted = self.arrival.post(signature, self._waits_for(action, self.stage - 1))
        contract, receipt = posted
        received = dict(zip(contract.travelling(), receipt.wait(), strict=True))
        return contract, Inbox.of(received, contract, training)

    def _to_keep(self, signature: Hashable) -> Sequence[Leaf] | None:
        """What units return that stages further on want; None where values do not pass stages by."""
        if self.departure is None or not self.departure.skip_connections:
            return None
        return self.departure.results(signature)

    def _keep_edges(self, held: _Held) -> None:
        """Keep where gradients enter, not the tensors: what was sent may be freed when it has left."""
        run = held.run
        assert run.outputs is not None and held.departure is not None
        for position in held.departure.travelling():
            if held.departure.values[position][1]:
                held.edges[position] = get_gradient_edge(run.outputs[position])
        run.outputs = None

    def _backward(self, action: Action, work: StepWork, moments: list[Any]) -> None:
        m = action.microbatch
        held = self._held.pop(m)
        gradients = self._gradients(action, held, work)
        moments.append(moments[-1] if self.departure is None else self.clock.mark())
        if held.again:
            self._run_again(held, work)
        if gradients:
            with held.run.replay():
                torch.autograd.backward(held.roots(), gradients)
        if self.arrival is not None and held.arrival is not None and held.inbox is not None:
            self.arrival.send_gradients(held.inbox, held.arrival)

    def _run_again(self, held: _Held, work: StepWork) -> None:
        """Run a forward that kept nothing once more, with the same random numbers, for its backward."""
        m = held.run.microbatch
        key = self.cut.streams.begin(work.batch, m)
        values, units = held.inbox.values if held.inbox else {}, held.arrival.units if held.arrival else {}
        keep = self._to_keep(work.signatures[m])
        held.run = StageRun(self.cut, self.stage, m, key, values, units, learn=False, again=True, keep=keep)
        held.run.forward(work.steps[m])
        self._keep_edges(held)

    def _gradients(self, action: Action, held: _Held, work: StepWork) -> Sequence[Tensor]:
        """The gradients with which a backward begins."""
        if held.departure is None:
            assert held.loss is not None
            return [work.scales[action.microbatch].to(held.loss.dtype).reshape(held.loss.shape)]
        assert self.departure is not None
        self.departure.await_answer(held.departure)
        receipt = self._posted.pop(action, None)
        if receipt is None:
            receipt = self.departure.post_gradients(held.departure, self._waits_for(action, self.stage + 1))
        return receipt.wait()
