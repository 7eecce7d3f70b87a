"""An executor whose actions may be on slices of a sequence.

The one idea: a signature is new in one step, which runs whole micro-batches: there boundaries are agreed on, units
described and blocks checked, as with any schedule. From the next step on an action with a slice runs the blocks on that
slice, and what crosses a boundary is the slice of what was agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.runtime.stage_executor import StageExecutor
from lightning_parallel.pipeline.runtime.work import StepWork
from lightning_parallel.pipeline.schedule import Action
from lightning_parallel.pipeline.stage.boundary import Contract, ReceivedValues, RecvBoundary, SendBoundary
from lightning_parallel.pipeline.stage.calls import ONCE
from lightning_parallel.pipeline.stage.stage_run import UnitOutputs
from lightning_parallel.pipeline.token_slices.lengths import Slices
from lightning_parallel.pipeline.token_slices.microbatch import SlicedMicrobatch
from lightning_parallel.pipeline.token_slices.plan import CheckedRun, FinalRun, PlanRun
from lightning_parallel.pipeline.transport.channel import AnyReceipt
from lightning_parallel.pipeline.transport.tensor_meta import TensorMeta


@dataclass
class Learned:
    """What is known of a signature: what units up to this stage return, and the length of the sequences."""

    units: UnitOutputs
    length: int


class TokenStageExecutor(StageExecutor):
    """A stage that runs slices; the arguments are `StageExecutor`'s.

    Args:
        slices: how sequences are cut.
    """

    run_type = CheckedRun

    def __init__(self, *args: Any, slices: Slices, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slices = slices
        self._learned: dict[Hashable, Learned] = {}
        self._microbatches: dict[int, SlicedMicrobatch] = {}
        self._inboxes: dict[tuple[int, int], ReceivedValues] = {}
        self._losses: dict[int, Tensor] = {}

    def knows(self, signature: Hashable) -> bool:
        """Whether micro-batches of a signature can run in slices; at one time on all ranks."""
        return signature in self._learned

    def forget_agreements(self) -> None:
        super().forget_agreements()
        self._learned.clear()

    def clear(self) -> None:
        super().clear()
        for kept in (self._microbatches, self._inboxes, self._losses):
            kept.clear()

    def learns(self, signature: Hashable, training: bool) -> bool:
        return super().learns(signature, training) or (training and signature not in self._learned)

    # -- receives ------------------------------------------------------------------------------------------------------

    def post(self, action: Action, work: StepWork) -> bool:
        if action.slice is None:
            return super().post(action, work)
        boundary = self.arrival if action.kind == "F" else self.departure
        if boundary is not None and action not in self._posted:
            self._posted[action] = self._start(action, work)
        return True

    def _start(self, action: Action, work: StepWork) -> AnyReceipt:
        """Start receiving what an action on a slice needs."""
        if action.kind == "F":
            assert self.arrival is not None
            contract, of = self._agreed(self.arrival, action, work), self.arrival
            what = self._waits_for(action, of.source)
            return of.forward.post(contract.metas(contract.travelling()), what)
        assert self.departure is not None
        contract = self._agreed(self.departure, action, work)
        return self.departure.post_gradients(contract, self._waits_for(action, self.departure.target))

    def _agreed(self, boundary: RecvBoundary | SendBoundary, action: Action, work: StepWork) -> Contract:
        """What crosses a boundary with a slice."""
        signature = work.signatures[action.microbatch]
        whole = boundary.agreed(signature)
        assert whole is not None and whole.needed is not None and action.slice is not None
        start, end = self._bounds(signature)[action.slice]
        values = {
            place: (_narrow(whole.values[place][0], end - start), whole.values[place][1]) for place in whole.needed
        }
        return Contract(values, {}, whole.needed)

    def _bounds(self, signature: Hashable) -> tuple[tuple[int, int], ...]:
        return self.slices.bounds(self._learned[signature].length)

    # -- actions -------------------------------------------------------------------------------------------------------

    def forward(self, action: Action, work: StepWork, ready: Callable[[], None]) -> Any:
        if action.slice is None:
            result = super().forward(action, work, ready)
            if work.training:
                self._learn(action.microbatch, work)
            return result
        m, number = action.microbatch, action.slice
        inbox = self._take(action, work)
        ready()
        if number == 0:
            self._microbatches[m] = self._begin(m, work)
        microbatch = self._microbatches[m]
        self._inboxes[m, number] = inbox
        if self.departure is not None:
            contract = self._agreed(self.departure, action, work)
            outputs = microbatch.forward(number, inbox.values, contract.travelling())
            self.departure.forward.send(outputs, contract.metas(contract.travelling()))
            return None
        microbatch.forward(number, inbox.values, ())
        return self._finish(m, work) if number == len(microbatch.bounds) - 1 else None

    def _learn(self, microbatch: int, work: StepWork) -> None:
        """After a whole micro-batch of a new signature."""
        held, signature = self._held[microbatch], work.signatures[microbatch]
        contracts = [contract for _, contract in (*held.came, *held.left)]
        if signature in self._learned or work.is_void:
            return
        if any(contract.going != ONCE for contract in contracts):
            raise PhantomError(
                "The step calls the model several times, and a schedule of token slices calls its blocks once. Use a"
                " schedule of whole micro-batches."
            )
        run = held.run
        assert isinstance(run, CheckedRun) and run.record is not None
        for _, contract in held.came:
            self._refuse_whole(contract, run.length)
        self._learned[signature] = Learned({**run.known, **run.record}, run.length)

    def _refuse_whole(self, contract: Contract, length: int) -> None:
        """Raise if something crosses that has no slices."""
        for place in contract.needed or ():
            shape = contract.values[place][0].shape
            if len(shape) < 2 or shape[1] != length:
                raise PhantomError(
                    f"Stage {self.stage} needs a tensor of shape {shape} of stage {self.stage - 1}, which does not have"
                    f" the {length} positions of the sequence in dim 1, so it has no token slices. Let every stage"
                    " compute it, or use a schedule of whole micro-batches."
                )

    def _take(self, action: Action, work: StepWork) -> ReceivedValues:
        """Wait for a slice."""
        if self.arrival is None:
            return ReceivedValues({})
        receipt = self._posted.pop(action, None) or self._start(action, work)
        return ReceivedValues.of([(self._agreed(self.arrival, action, work), receipt.wait())], work.training)

    def _begin(self, microbatch: int, work: StepWork) -> SlicedMicrobatch:
        """Run the step up to this stage's end, noting what its blocks are called with."""
        run = PlanRun(*self._run_arguments(microbatch, work))
        run.forward(work.steps[microbatch])
        return SlicedMicrobatch(run, self._bounds(work.signatures[microbatch]), self.cut.streams)

    def _run_arguments(self, microbatch: int, work: StepWork) -> tuple[Any, ...]:
        key = self.cut.streams.begin(work.batch, microbatch)
        return self.cut, self.stage, microbatch, key, {}, self._learned[work.signatures[microbatch]].units, False

    def _finish(self, microbatch: int, work: StepWork) -> Any:
        """Run the step to its end with what its last block returned."""
        joined = self._microbatches[microbatch].joined()
        result = FinalRun(*self._run_arguments(microbatch, work), joined=joined).forward(work.steps[microbatch])
        assert work.loss_of is not None
        self._losses[microbatch] = work.loss_of(result)
        return tree_map_only(Tensor, Tensor.detach, result)

    def backward(self, action: Action, work: StepWork, ready: Callable[[], None]) -> None:
        if action.slice is None:
            super().backward(action, work, ready)
            return
        m, number = action.microbatch, action.slice
        microbatch = self._microbatches[m]
        gradients = self._slice_gradients(action, work)
        ready()
        if m in self._losses:
            loss = self._losses.pop(m)
            torch.autograd.backward(loss, work.scales[m].to(loss.dtype).reshape(loss.shape))
        if self.departure is None:
            gradients = microbatch.of_joined(number)
        with work.early.backward(action) if work.early is not None else nullcontext():
            microbatch.backward(number, gradients)
        inbox = self._inboxes.pop((m, number))
        if self.arrival is not None:
            self.arrival.send_gradients(inbox, self._agreed(self.arrival, action, work))
        if number == 0:
            del self._microbatches[m]

    def _slice_gradients(self, action: Action, work: StepWork) -> dict[Any, Tensor]:
        """The gradients of what a slice sent."""
        if self.departure is None:
            return {}
        receipt = self._posted.pop(action, None) or self._start(action, work)
        places = self._agreed(self.departure, action, work).with_gradient()
        return dict(zip(places, receipt.wait(), strict=True))


def _narrow(meta: TensorMeta, length: int) -> TensorMeta:
    """The description of so many positions, contiguous."""
    shape = (meta.shape[0], length, *meta.shape[2:])
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorMeta(shape, tuple(strides), meta.dtype)
