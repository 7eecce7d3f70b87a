"""What a stage receives for its actions, over which boundaries, and what its forwards leave for their backwards.

The one idea: a forward needs what earlier stages made, a backward the gradients of what was sent; either is posted once
it is known what comes, before the action that takes it. Of a forward, where gradients enter the graph is kept, not the
tensors that were sent, which may be freed when they have left.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel.pipeline.runtime.work import StepWork
from lightning_parallel.pipeline.schedule import Action
from lightning_parallel.pipeline.stage.boundary import Contract, ReceivedValues, RecvBoundary, SendBoundary
from lightning_parallel.pipeline.stage.stage_run import StageRun
from lightning_parallel.pipeline.stage.stage_values import Place
from lightning_parallel.pipeline.transport.channel import AnyReceipt


@dataclass
class SavedForward:
    """A forward that waits for its backward.

    Args:
        inbox: what came in.
        came: over which boundaries, and what was agreed there; that to the stage before is first.
        left: the same of what was sent; empty on the last stage.
        run: the forward, None if it could not run.
        edges: where the gradient of a value that was sent enters the graph.
        loss: on the last stage.
        again: the forward has to run again before its backward.
    """

    inbox: ReceivedValues
    came: list[tuple[RecvBoundary, Contract]] = field(default_factory=list)
    left: list[tuple[SendBoundary, Contract]] = field(default_factory=list)
    run: StageRun | None = None
    edges: dict[Place, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    again: bool = False

    def roots(self) -> Sequence[Any]:
        """Where the backward begins."""
        if self.run is None:
            return []
        return [self.edges[place] for _, of in self.left for place in of.with_gradient()] if self.left else [self.loss]

    def keep_edges(self) -> None:
        """Of what the run made, keep where gradients enter."""
        run = self.run
        assert run is not None and run.outputs is not None
        for _, contract in self.left:
            run.refuse_written(contract.travelling())
            for place in contract.travelling():
                if contract.values[place][1]:
                    self.edges[place] = get_gradient_edge(run.outputs[place])
        run.drop_outputs()


class StageBoundaries:
    """Where a stage receives from and sends to.

    Args:
        stage: which stage.
        arrival: the boundary to the stage before, None on the first.
        departure: the boundary to the stage after, None on the last.

    Attributes:
        straight_in, straight_out: the boundaries to stages that are no neighbours and make what this one uses, or use
            what it makes; nearest first.
    """

    def __init__(self, stage: int, arrival: RecvBoundary | None, departure: SendBoundary | None) -> None:
        self.stage, self.arrival, self.departure = stage, arrival, departure
        self.straight_in: list[RecvBoundary] = []
        self.straight_out: list[SendBoundary] = []

    def settle(self) -> None:
        """Before a step: hear the answers of the step before, let go of what was sent."""
        for boundary in self.boundaries():
            boundary.settle()

    def forget_agreements(self) -> None:
        """Let go of all that was agreed with other stages; on all ranks at one moment."""
        for boundary in self.boundaries():
            boundary.forget()

    def boundaries(self) -> Iterator[RecvBoundary | SendBoundary]:
        """To all stages that this one has dealings with."""
        neighbours = (self.departure, self.arrival)
        yield from (boundary for boundary in neighbours if boundary is not None)
        yield from chain(self.straight_out, self.straight_in)

    def waits(self, action: Action) -> bool:
        """Whether an action needs what another rank makes."""
        neighbour = self.arrival if action.kind == "F" else self.departure if action.kind in "BI" else None
        straight: Sequence[RecvBoundary | SendBoundary] = self.straight_in if action.kind == "F" else self.straight_out
        return neighbour is not None and not all(boundary.is_local for boundary in (neighbour, *straight))

    def sources(self, signature: Hashable) -> Iterator[RecvBoundary]:
        """The boundaries over which a forward receives, that to the stage before first."""
        if self.arrival is not None:
            yield self.arrival
            yield from (arrival for arrival in self.straight_in if arrival.knows(signature))

    def targets(self, signature: Hashable) -> Iterator[SendBoundary]:
        """The boundaries over which a forward sends, the furthest stage first: it used what it got last."""
        yield from (departure for departure in reversed(self.straight_out) if departure.knows(signature))
        if self.departure is not None:
            yield self.departure


class Receiving(StageBoundaries):
    """The part of an executor that receives.

    Args:
        stage, arrival, departure: see `StageBoundaries`.
        replica: which copy of the stage, for messages, where there are several.
    """

    def __init__(
        self, stage: int, arrival: RecvBoundary | None, departure: SendBoundary | None, replica: int | None = None
    ) -> None:
        super().__init__(stage, arrival, departure)
        self._of_replica = "" if replica is None else f" of replica {replica}"
        self._held: dict[int, SavedForward] = {}
        self._posted: dict[Action, Any] = {}

    def post(self, action: Action, work: StepWork) -> bool:
        """Post an action's receives if what they bring has been agreed; if not, the action itself will ask.

        Returns:
            Whether nothing of the action is left to post.
        """
        if action in self._posted:
            return True
        if action.kind == "F":
            if self.arrival is None:
                return True
            if self.arrival.knows(work.signatures[action.microbatch]):
                self._posted[action] = self._post_values(action, work)
        elif action.kind in "BI":
            if self.departure is None:
                return True
            held = self._held.get(action.microbatch)
            if held is not None and all(contract.needed is not None for _, contract in held.left):
                self._posted[action] = self._post_gradients(action, held)
        else:
            return True
        return action in self._posted

    def _post_values(self, action: Action, work: StepWork) -> list[tuple[RecvBoundary, Contract, AnyReceipt]]:
        """Start receiving what a forward needs, from the stage before and from those that send straight."""
        signature = work.signatures[action.microbatch]
        return [(of, *of.post(signature, self._waits_for(action, of.source))) for of in self.sources(signature)]

    def _post_gradients(self, action: Action, held: SavedForward) -> list[AnyReceipt]:
        """Start receiving the gradients of what a forward sent."""
        return [of.post_gradients(contract, self._waits_for(action, of.target)) for of, contract in held.left]

    def _waits_for(self, action: Action, stage: int) -> str:
        return f"{action.kind}{action.microbatch} of stage {stage}{self._of_replica}"

    def receive(self, action: Action, work: StepWork) -> SavedForward:
        """Wait for what a forward needs."""
        posted = self._posted.pop(action, None)
        if posted is None:
            posted = self._post_values(action, work)
        inbox = ReceivedValues.of([(contract, receipt.wait()) for _, contract, receipt in posted], work.training)
        return SavedForward(inbox, [(of, contract) for of, contract, _ in posted])
