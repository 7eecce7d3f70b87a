"""What a stage receives for its actions: posted early where it is agreed, waited for where it is needed.

The one idea: a forward needs what earlier stages made, a backward the gradients of what was sent; either is posted once
it is known what comes, before the action that takes it.
"""

from __future__ import annotations

from typing import Any

from lightning_parallel.pipeline.runtime.saved_forward import SavedForward
from lightning_parallel.pipeline.runtime.stage_boundaries import StageBoundaries
from lightning_parallel.pipeline.runtime.work import StepWork
from lightning_parallel.pipeline.schedule import Action
from lightning_parallel.pipeline.stage.boundary import Contract, ReceivedValues, RecvBoundary, SendBoundary
from lightning_parallel.pipeline.transport.channel import AnyReceipt


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
