"""One stage on one rank: what its forwards, backwards and weight gradients do.

The one idea: a rank has a *seat* for every stage it holds. A seat knows the stage before and the stage after it (on
another rank, or on this one), keeps what each forward left for its backward, and drops it when the backward is done.
Which seat acts when is the engine's business.
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
from lightning_parallel.pipeline.calls import ONCE
from lightning_parallel.pipeline.channel import AnyReceipt
from lightning_parallel.pipeline.cut import Cut
from lightning_parallel.pipeline.deferred import Deferred
from lightning_parallel.pipeline.phantom import Leaf
from lightning_parallel.pipeline.schedule import Action
from lightning_parallel.pipeline.stage import CalledAgain, Place, StageRun, UnitOutputs
from lightning_parallel.pipeline.work import StepWork


@dataclass
class _Held:
    """A forward that waits for its backward."""

    run: StageRun | None  # None: it could not run
    inbox: Inbox | None = None
    arrival: Contract | None = None
    departure: Contract | None = None
    edges: dict[Place, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    again: bool = False  # the forward has to run again before its backward

    def roots(self) -> Sequence[Any]:
        """Where the backward begins."""
        if self.run is None:
            return []
        return [self.loss] if self.departure is None else [self.edges[p] for p in self.departure.with_gradient()]


class Seat:
    """A stage that this rank holds.

    Args:
        cut: the model, cut.
        stage: which stage.
        arrival: the boundary to the stage before, None on the first.
        departure: the boundary to the stage after, None on the last.
        replica: which copy of the stage, for messages, where there are several.

    Attributes:
        keep_received: keep copies in `received` of what comes in for each micro-batch of a step (for `check_loss`).
    """

    def __init__(
        self,
        cut: Cut,
        stage: int,
        arrival: Arrival | None,
        departure: Departure | None,
        replica: int | None = None,
    ) -> None:
        self.cut, self.stage, self.arrival, self.departure = cut, stage, arrival, departure
        self._of_replica = "" if replica is None else f" of replica {replica}"
        self.keep_received = False
        self.received: dict[int, tuple[dict[Place, Tensor], UnitOutputs]] = {}
        self._held: dict[int, _Held] = {}
        self._waiting: dict[int, Deferred] = {}
        self._posted: dict[Action, Any] = {}

    @property
    def holds(self) -> bool:
        """Whether a forward of this step waits for its backward."""
        return bool(self._held)

    def clear(self) -> None:
        """Forget the step before."""
        for kept in (self._held, self._waiting, self._posted, self.received):
            kept.clear()

    def forget(self, training: bool) -> None:
        """The step is over."""
        self._held.clear()
        if self.cut.graphs is not None:
            self.cut.graphs.end(training)

    def settle(self) -> None:
        """Before a step: hear the answers of the step before, let go of what was sent."""
        for boundary in (self.departure, self.arrival):
            if boundary is not None:
                boundary.settle()

    def forget_agreements(self) -> None:
        """Let go of all that was agreed with other stages; on all ranks at one moment."""
        for boundary in (self.departure, self.arrival):
            if boundary is not None:
                boundary.forget()

    # -- receives ------------------------------------------------------------------------------------------------------

    def source_of(self, action: Action) -> Arrival | Departure | None:
        """The boundary over which what an action needs comes from another stage."""
        return self.arrival if action.kind == "F" else self.departure if action.kind in "BI" else None

    def post(self, action: Action, work: StepWork) -> bool:
        """Post an action's receive if what it brings has been agreed; if not, the action itself will ask.

        Returns:
            Whether nothing of the action is left to post.
        """
        if action in self._posted or self.source_of(action) is None:
            return True
        if action.kind == "F":
            assert self.arrival is not None
            signature = work.signatures[action.microbatch]
            if self.arrival.knows(signature):
                self._posted[action] = self.arrival.post(signature, self._waits_for(action, self.stage - 1))
        elif action.microbatch in self._held:
            contract = self._held[action.microbatch].departure
            if contract is not None and contract.needed is not None:
                assert self.departure is not None
                self._posted[action] = self.departure.post_gradients(contract, self._waits_for(action, self.stage + 1))
        return action in self._posted

    def _waits_for(self, action: Action, stage: int) -> str:
        return f"{action.kind}{action.microbatch} of stage {stage}{self._of_replica}"

    def _receive(self, action: Action, work: StepWork) -> tuple[Contract | None, Inbox | None]:
        if self.arrival is None:
            return None, None
        posted: tuple[Contract, AnyReceipt] | None = self._posted.pop(action, None)
        if posted is None:
            signature = work.signatures[action.microbatch]
            posted = self.arrival.post(signature, self._waits_for(action, self.stage - 1))
        contract, receipt = posted
        received = dict(zip(contract.travelling(), receipt.wait(), strict=True))
        return contract, Inbox.of(received, contract, work.training)

    # -- actions -------------------------------------------------------------------------------------------------------

    def forward(self, action: Action, work: StepWork, ready: Callable[[], None]) -> Any:
        """F: run the step as this stage; `ready` is called when what it needs is there. Returns the step's result."""
        m = action.microbatch
        contract, inbox = self._receive(action, work)
        ready()
        signature = work.signatures[m]
        ahead = self.departure.agreed(signature) if self.departure is not None else None
        if any(of is not None and of.is_void for of in (contract, ahead)):
            return self._go_without(m, _Held(None, inbox, contract), work)
        if self.cut.graphs is not None:
            self.cut.graphs.enter(signature)
        learn = self.departure is not None and ahead is None
        key = self.cut.streams.begin(work.batch, m)
        values, going = inbox.values if inbox else {}, ONCE if ahead is None else ahead.going
        units = contract.units if contract is not None else ahead.units if ahead is not None else {}
        if self.keep_received:
            self.received[m] = ({position: value.detach().clone() for position, value in values.items()}, units)
        twice = self.cut.recomputes_stage(self.stage) and work.training and not learn
        if twice:  # the first run may write into what came in
            values = {position: value.detach().clone() for position, value in values.items()}
        keep = self._to_keep(signature)
        with torch.no_grad() if twice else nullcontext():
            run = StageRun(self.cut, self.stage, m, key, values, units, learn, keep=keep, going=going)
            try:
                result = run.forward(work.steps[m])
            except CalledAgain:
                is_new = learn if contract is None else contract.needed is None
                if not work.may_begin_anew or not is_new:
                    raise
                return self._go_without(m, _Held(None, inbox, contract), work)
        held = _Held(run, inbox, contract, again=twice)
        if self.departure is not None:
            held.departure = self.departure.send(run, signature)
        if self.arrival is not None and contract is not None:
            self.arrival.answer(run, contract, held.departure.results() if held.departure is not None else ())
        self._keep(held, result, work)
        return tree_map_only(Tensor, Tensor.detach, result)

    def _go_without(self, microbatch: int, held: _Held, work: StepWork) -> None:
        """The step calls other stages as it was not expected to: nothing is computed, what is waited for is sent."""
        work.is_void = True
        if self.arrival is not None and held.arrival is not None:
            self.arrival.answer_void(held.arrival)
        if self.departure is not None:
            held.departure = self.departure.send_void(work.signatures[microbatch])
        if work.training:
            self._held[microbatch] = held

    def _keep(self, held: _Held, result: Any, work: StepWork) -> None:
        """Keep of a forward what its backward needs."""
        if not work.training:
            return
        if held.departure is None:
            assert work.loss_of is not None
            held.loss = work.loss_of(result)
        elif held.again and held.run is not None:
            held.run.outputs = None
        else:
            self._keep_edges(held)
        assert held.run is not None
        self._held[held.run.microbatch] = held

    def _to_keep(self, signature: Hashable) -> Sequence[Leaf] | None:
        """What units return that stages further on want; None where values do not pass stages by."""
        if self.departure is None or not self.departure.skip_connections:
            return None
        return self.departure.results(signature)

    def _keep_edges(self, held: _Held) -> None:
        """Keep where gradients enter, not the tensors: what was sent may be freed when it has left."""
        run, contract = held.run, held.departure
        assert run is not None and run.outputs is not None and contract is not None
        run.refuse_written(contract.travelling())
        for position in contract.travelling():
            if contract.values[position][1]:
                held.edges[position] = get_gradient_edge(run.outputs[position])
        run.outputs = None

    def backward(self, action: Action, work: StepWork, ready: Callable[[], None]) -> None:
        """B: the gradients of parameters and of what came in; I: the same but for products of weights, which wait."""
        held = self._held.pop(action.microbatch)
        if held.departure is not None and self.departure is not None:
            self.departure.await_answer(held.departure)
        deferred = None if held.again else self._prepare(action, held)  # while the gradients are on their way
        gradients = self._gradients(action, held, work)
        ready()
        if held.again:
            self._run_again(held, work)
            deferred = self._prepare(action, held)
        if work.windows is not None and self.cut.recomputes_stage(self.stage):
            work.windows.turn(self.stage)
        if gradients and held.run is not None:
            with held.run.replay(), work.early.backward(action) if work.early is not None else nullcontext():
                if deferred is None:
                    torch.autograd.backward(held.roots(), gradients)
                else:
                    deferred.backward(gradients)
                    self._waiting[action.microbatch] = deferred
        if self.arrival is not None and held.arrival is not None and held.inbox is not None:
            self.arrival.send_gradients(held.inbox, held.arrival)

    def _prepare(self, action: Action, held: _Held) -> Deferred | None:
        return Deferred(held.roots(), self.cut.graphs) if action.kind == "I" and held.run is not None else None

    def weights(self, action: Action, work: StepWork) -> None:
        """W: the products of weights that an I left waiting."""
        deferred = self._waiting.pop(action.microbatch, None)  # none where the I had nothing to do
        if deferred is not None:
            deferred.run(None if work.early is None else work.early.weights(action, deferred.parameters))

    def _run_again(self, held: _Held, work: StepWork) -> None:
        """Run a forward that kept nothing once more, with the same random numbers, for its backward."""
        assert held.run is not None
        m, going = held.run.microbatch, held.run.going
        key = self.cut.streams.begin(work.batch, m)
        values, units = held.inbox.values if held.inbox else {}, held.run.known
        keep = self._to_keep(work.signatures[m])
        run = held.run = StageRun(
            self.cut, self.stage, m, key, values, units, False, again=True, keep=keep, going=going
        )
        run.forward(work.steps[m])
        self._keep_edges(held)

    def _gradients(self, action: Action, held: _Held, work: StepWork) -> Sequence[Tensor]:
        """The gradients with which a backward begins."""
        if held.departure is None:
            if held.loss is None:
                return []
            return [work.scales[action.microbatch].to(held.loss.dtype).reshape(held.loss.shape)]
        assert self.departure is not None
        receipt = self._posted.pop(action, None)
        if receipt is None:
            receipt = self.departure.post_gradients(held.departure, self._waits_for(action, self.stage + 1))
        return receipt.wait()
