"""One stage on one rank: what its forwards, backwards and weight gradients do.

The one idea: a rank has a *executor* for every stage it holds. An executor knows the stage before and the stage after
    it (on
another rank, or on this one) and those that it has straight dealings with, keeps what each forward left for its
backward, and drops it when the backward is done. Which executor acts when is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline.runtime.receiving import Receiving, SavedForward
from lightning_parallel.pipeline.runtime.work import StepWork
from lightning_parallel.pipeline.schedule import Action
from lightning_parallel.pipeline.stage.boundary import Contract, RecvBoundary, SendBoundary
from lightning_parallel.pipeline.stage.calls import ONCE
from lightning_parallel.pipeline.stage.cut import CutModel
from lightning_parallel.pipeline.stage.stage_run import CalledAgain, StageRun
from lightning_parallel.pipeline.stage.stage_values import Place
from lightning_parallel.pipeline.weight_grad.deferred import Deferred


class StageExecutor(Receiving):
    """A stage that this rank holds.

    Args:
        cut: the model, cut.
        stage: which stage.
        arrival: the boundary to the stage before, None on the first.
        departure: the boundary to the stage after, None on the last.
        replica: which copy of the stage, for messages, where there are several.
        skips: stages may use what units of any earlier stage return.

    Attributes:
        run_type: how the step is run as this stage.
    """

    run_type = StageRun

    def __init__(
        self,
        cut: CutModel,
        stage: int,
        arrival: RecvBoundary | None,
        departure: SendBoundary | None,
        replica: int | None = None,
        skips: bool = False,
    ) -> None:
        super().__init__(stage, arrival, departure, replica)
        self.cut, self.skips = cut, skips
        self._waiting: dict[int, Deferred] = {}

    @property
    def holds(self) -> bool:
        """Whether a forward of this step waits for its backward."""
        return bool(self._held)

    def clear(self) -> None:
        """Forget the step before."""
        for kept in (self._held, self._waiting, self._posted):
            kept.clear()

    def forget(self, training: bool) -> None:
        """The step is over."""
        self._held.clear()
        if self.cut.graphs is not None:
            self.cut.graphs.end(training)

    def forward(self, action: Action, work: StepWork, ready: Callable[[], None]) -> Any:
        """F: run the step as this stage; `ready` is called when what it needs is there. Returns the step's result."""
        held = self.receive(action, work)
        ready()
        return self.run(action, held, work)

    def run(self, action: Action, held: SavedForward, work: StepWork, may_run_again: bool = True) -> Any:
        """Run the step as this stage with what came in; returns its result. `may_run_again`: whether it may keep
        nothing and run once more before its backward."""
        m, signature = action.microbatch, work.signatures[action.microbatch]
        contract = held.came[0][1] if held.came else None
        ahead = self.departure.agreed(signature) if self.departure is not None else None
        if any(of is not None and of.is_void for of in (contract, ahead)):
            return self._go_without(m, held, work)
        if self.cut.graphs is not None:
            self.cut.graphs.enter(signature)
        learn = self.learns(signature, work.training)
        held.again = may_run_again and self.cut.recomputes_stage(self.stage) and work.training and not learn
        try:
            with torch.no_grad() if held.again else nullcontext():
                run = self._first_run(m, held, work, ahead, learn)
                result = run.forward(work.steps[m])
        except CalledAgain:
            is_new = learn if contract is None else contract.needed is None
            if not work.may_begin_anew or not is_new:
                raise
            return self._go_without(m, held, work)
        held.run = run
        held.left = [(departure, departure.send(run, signature)) for departure in self.targets(signature)]
        if self.arrival is not None and contract is not None:
            self.arrival.answer(run, contract)
        self._keep(held, result, work)
        return tree_map_only(Tensor, Tensor.detach, result)

    def _first_run(
        self, microbatch: int, held: SavedForward, work: StepWork, ahead: Contract | None, learn: bool
    ) -> StageRun:
        """The run of a forward, with what came in; `ahead`: what is agreed with the stage after."""
        contract, values = held.came[0][1] if held.came else ahead, held.inbox.values
        units = {} if contract is None else contract.units
        going = ONCE if ahead is None else ahead.going
        if held.again:  # the first run may write into what came in
            values = _copied(values)
        key = self.cut.streams.begin(work.batch, microbatch)
        keep = self._to_keep(work.signatures[microbatch])
        return self.run_type(self.cut, self.stage, microbatch, key, values, units, learn, keep=keep, going=going)

    def learns(self, signature: Hashable, training: bool) -> bool:
        """Whether a run has to describe what this stage's units return."""
        return self.departure is not None and self.departure.agreed(signature) is None

    def _go_without(self, microbatch: int, held: SavedForward, work: StepWork) -> None:
        """The step calls other stages as it was not expected to: nothing is computed, what is waited for is sent."""
        work.is_void, held.again = True, False
        for arrival, contract in held.came:
            arrival.answer_void(contract)
        if self.departure is not None:
            held.left.append((self.departure, self.departure.send_void(work.signatures[microbatch])))
        if work.training:
            self._held[microbatch] = held

    def _keep(self, held: SavedForward, result: Any, work: StepWork) -> None:
        """Keep of a forward what its backward needs."""
        if not work.training:
            return
        assert held.run is not None
        if not held.left:
            assert work.loss_of is not None
            held.loss = work.loss_of(result)
        elif held.again:
            held.run.drop_outputs()
        else:
            held.keep_edges()
        self._held[held.run.microbatch] = held

    def _to_keep(self, signature: Hashable) -> Sequence[Place] | None:
        """What of a run is sent; None where that is all that the next stage's first block is called with."""
        if not self.skips or self.departure is None:
            return None
        return [place for departure in self.targets(signature) for place in departure.needed(signature)]

    def backward(self, action: Action, work: StepWork, ready: Callable[[], None]) -> None:
        """B: the gradients of parameters and of what came in; I: the same but for products of weights, which wait."""
        held = self.take_held(action)
        deferred = None if held.again else self._prepare(action, held)  # while the gradients are on their way
        gradients = self.gradients(action, held, work)
        ready()
        if held.again:
            self.run_again(held, work)
            deferred = self._prepare(action, held)
        if work.windows is not None and self.cut.recomputes_stage(self.stage):
            work.windows.turn(self.stage)
        if gradients and held.run is not None:
            if work.windows is not None:
                work.windows.expect(held.roots())
            with held.run.replay(), work.early.backward(action) if work.early is not None else nullcontext():
                if deferred is None:
                    torch.autograd.backward(held.roots(), gradients)
                else:
                    deferred.backward(gradients)
                    self.wait_for_weights(action, deferred)
        for arrival, came in held.came:
            arrival.send_gradients(held.inbox, came)

    def take_held(self, action: Action) -> SavedForward:
        """What the forward of a backward left; it is known what of it was needed."""
        held = self._held.pop(action.microbatch)
        for departure, contract in held.left:
            departure.await_answer(contract)
        return held

    def wait_for_weights(self, action: Action, deferred: Deferred) -> None:
        """Keep what an I left until the W of its micro-batch."""
        self._waiting[action.microbatch] = deferred

    def _prepare(self, action: Action, held: SavedForward) -> Deferred | None:
        if action.kind != "I" or held.run is None:
            return None
        windows = self.cut.windows
        return Deferred(held.roots(), self.cut.graphs, None if windows is None else windows.lends)

    def weights(self, action: Action, work: StepWork) -> None:
        """W: the products of weights that an I left waiting."""
        deferred = self._waiting.pop(action.microbatch, None)  # none where the I had nothing to do
        if deferred is not None:
            deferred.run(None if work.early is None else work.early.weights(action, deferred.parameters))

    def run_again(self, held: SavedForward, work: StepWork) -> None:
        """Run a forward that kept nothing once more, with the same random numbers, for its backward."""
        assert held.run is not None
        m, going = held.run.microbatch, held.run.going
        key = self.cut.streams.begin(work.batch, m)
        keep = self._to_keep(work.signatures[m])
        run = held.run = StageRun(
            self.cut, self.stage, m, key, held.inbox.values, held.run.known, False, again=True, keep=keep, going=going
        )
        run.forward(work.steps[m])
        held.keep_edges()

    def gradients(self, action: Action, held: SavedForward, work: StepWork) -> Sequence[Tensor]:
        """The gradients with which a backward begins."""
        if not held.left:
            if held.loss is None:
                return []
            return [work.scales[action.microbatch].to(held.loss.dtype).reshape(held.loss.shape)]
        receipts = self._posted.pop(action, None)
        if receipts is None:
            receipts = self._post_gradients(action, held)
        return [gradient for receipt in receipts for gradient in receipt.wait()]


def _copied(values: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    return {place: value.detach().clone() for place, value in values.items()}
