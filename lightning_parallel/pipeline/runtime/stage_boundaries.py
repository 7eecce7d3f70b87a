"""The boundaries of one stage: to its neighbours, and to those stages that it has straight dealings with."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

from lightning_parallel.pipeline.schedule import Action
from lightning_parallel.pipeline.stage.boundary import RecvBoundary, SendBoundary


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
