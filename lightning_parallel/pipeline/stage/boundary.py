"""What crosses from one stage to the next, agreed once per input signature.

The one idea: `Contract` is plain data, made by a header of the earlier stage and an answer of the later one. From then
on only what the later stage lacks travels (`SendBoundary`, `RecvBoundary`). Everything that came in, from whatever
stage, is what one autograd node gives out (`ReceivedValues`), so a backward stops there, and each stage that sent
something gets its gradients from one place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.stage.calls import ONCE, StopRule
from lightning_parallel.pipeline.stage.stage_run import StageRun, UnitOutputs
from lightning_parallel.pipeline.stage.stage_values import Place
from lightning_parallel.pipeline.transport.channel import AnyChannel, AnyReceipt
from lightning_parallel.pipeline.transport.tensor_meta import TensorMeta, describe

Values = dict[Place, tuple[TensorMeta, bool]]  # what is known of values, and whether they carry a gradient


@dataclass
class Contract:
    """What was agreed for one signature.

    Attributes:
        values: {place: (meta, carries a gradient)} of every tensor that the earlier stage holds and the next one may
            need: by position among the arguments, or as what a unit returned.
        units: what the units up to the boundary return.
        needed: places of those that the later stage lacks, None until it has answered.
        is_new: all values travel, whatever was answered.
        going: how far the earlier stage runs.
        is_void: the later stage cannot run yet, so nothing travels.
    """

    values: Values
    units: UnitOutputs
    needed: tuple[Place, ...] | None = None
    is_new: bool = False
    going: StopRule = ONCE
    is_void: bool = False

    def travelling(self) -> tuple[Place, ...]:
        return tuple(self.values) if self.needed is None or self.is_new else self.needed

    def metas(self, positions: Sequence[Place]) -> list[TensorMeta]:
        return [self.values[position][0] for position in positions]

    def with_gradient(self) -> tuple[Place, ...]:
        assert self.needed is not None
        return tuple(position for position in self.needed if self.values[position][1])


_ANCHOR = torch.empty(0, requires_grad=True)  # what makes the outputs of `_Receive` require a gradient


@dataclass
class ReceivedValues:
    """Received values as a step may use them, and the gradients it left."""

    values: dict[Place, Tensor]
    carrying: tuple[Place, ...] = ()
    gradients: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, received: Sequence[tuple[Contract, Sequence[Tensor]]], grad: bool) -> ReceivedValues:
        """Values that carry a gradient become outputs of one autograd node: a block may even write into them."""
        inbox = cls({})
        for contract, tensors in received:
            places = contract.travelling()
            inbox.values.update(zip(places, tensors, strict=True))
            inbox.carrying += tuple(place for place in places if grad and contract.values[place][1])
        if inbox.carrying:
            carrying = [inbox.values[place] for place in inbox.carrying]
            inbox.values.update(zip(inbox.carrying, _Receive.apply(_ANCHOR, inbox.gradients, carrying), strict=True))
        return inbox

    def take_gradients(self, contract: Contract) -> list[Tensor]:
        """Gradients of the values that carry one, zeros where the step did not use a value."""
        positions = contract.with_gradient()
        if not self.gradients:
            return [torch.zeros_like(self.values[position], requires_grad=False) for position in positions]
        of = dict(zip(self.carrying, self.gradients, strict=True))
        return [of[position] for position in positions]


class _Receive(torch.autograd.Function):
    """Gives received tensors a place in the graph; its backward keeps their gradients.

    It holds a list for them and not the inbox, whose values hold the node: nobody would find that circle, which leads
    through C++.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, left: list[Tensor], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.left = left
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.left[:] = gradients
        return None, None, None


class SendBoundary:
    """The earlier stage's side of a boundary: values go forward, gradients come back.

    Args:
        stage: the earlier stage.
        forward, backward: the channels.
        dynamic_shapes: agree anew for every micro-batch.
        alone: every rank holds one stage, so that an answer can be waited for at any time.
        target: the later stage; default the next one.
    """

    def __init__(
        self,
        stage: int,
        forward: AnyChannel,
        backward: AnyChannel,
        dynamic_shapes: bool = False,
        alone: bool = True,
        target: int | None = None,
    ) -> None:
        self.stage, self.forward, self.backward, self.dynamic_shapes = stage, forward, backward, dynamic_shapes
        self.alone, self.is_local, self.target = alone, forward.is_local, stage + 1 if target is None else target
        self._contracts: dict[Hashable, Contract] = {}
        self._unanswered: deque[Contract] = deque()

    @property
    def stages(self) -> tuple[int, int]:
        """The stages between which it lies."""
        return self.stage, self.target

    def knows(self, signature: Hashable) -> bool:
        return signature in self._contracts

    def agreed(self, signature: Hashable) -> Contract | None:
        return self._contracts.get(signature)

    def needed(self, signature: Hashable) -> Sequence[Place]:
        """What a run of that signature has to send, as far as it is known."""
        contract = self._contracts.get(signature)
        return () if contract is None or contract.needed is None else contract.needed

    def give(self, signature: Hashable, contract: Contract) -> None:
        """What somebody else found out for a signature."""
        self._contracts[signature] = contract

    def send_void(self, signature: Hashable) -> Contract:
        """Tell the next stage, once, that it will not get anything."""
        contract = self._contracts.get(signature)
        if contract is None:
            contract = self._contracts[signature] = Contract({}, {}, needed=(), is_void=True)
            self._send_header(contract)
        return contract

    def send(self, run: StageRun, signature: Hashable) -> Contract:
        """Send what the next stage needs of a run that was cut there; returns what was agreed."""
        assert run.outputs is not None
        contract = self._contracts.get(signature)
        if contract is None:
            tensors = {i: x for i, x in run.outputs.items() if isinstance(x, Tensor) and isinstance(i, int)}
            units = {**run.known, **(run.record or {})}
            values: Values = {i: (describe(t), t.requires_grad) for i, t in tensors.items()}
            contract = Contract(values, units, is_new=not self.alone)
            self._send_header(contract)
            self._unanswered.append(contract)
            if not self.dynamic_shapes:
                self._contracts[signature] = contract
        else:
            if self.alone:
                self.await_answer(contract)
            self._check(run, contract)
        travelling = contract.travelling()
        self.forward.send([run.outputs[position] for position in travelling], contract.metas(travelling))
        return contract

    def await_answer(self, contract: Contract) -> None:
        """Learn which values the next stage needs, if it has not been learnt: answers come in the order of headers."""
        while contract.needed is None:
            self._hear_answer()

    def settle(self) -> None:
        """Before a step: hear the answers of the step before, and let go of what was sent before that one."""
        while self._unanswered:
            self._hear_answer()
        _grow_old(self._contracts)
        self.forward.settle()

    def forget(self) -> None:
        """Let go of all that was agreed."""
        while self._unanswered:
            self._hear_answer()
        self._contracts.clear()

    def _hear_answer(self) -> None:
        asked = self._unanswered.popleft()
        asked.needed = self.backward.receive_object(f"stage {self.target} to say what it needs")

    def post_gradients(self, contract: Contract, what: str) -> AnyReceipt:
        """Start receiving the gradients of the values that carry one."""
        return self.backward.post(contract.metas(contract.with_gradient()), what)

    def _send_header(self, contract: Contract) -> None:
        try:
            self.forward.send_object((contract.values, contract.units, contract.is_void))
        except Exception as error:
            raise PhantomError(undescribable(self.stage, f"stage {self.target}", error)) from error

    def _check(self, run: StageRun, contract: Contract) -> None:
        assert run.outputs is not None
        for position in contract.travelling():
            agreed, leaf = contract.values[position][0], run.outputs.get(position)
            if not isinstance(leaf, Tensor) or tuple(leaf.shape) != agreed.shape or leaf.dtype != agreed.dtype:
                now = f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(
                    f"Stage {self.stage} sends {now} where it sent {agreed.dtype} {agreed.shape} before for a batch of"
                    " the same shapes. Set PipelineStrategy(dynamic_shapes=True) to agree on every transfer anew."
                )


class RecvBoundary:
    """The later stage's side of a boundary; see `SendBoundary`."""

    def __init__(
        self,
        stage: int,
        forward: AnyChannel,
        backward: AnyChannel,
        dynamic_shapes: bool = False,
        alone: bool = True,
        source: int | None = None,
    ) -> None:
        self.stage, self.forward, self.backward, self.dynamic_shapes = stage, forward, backward, dynamic_shapes
        self.alone, self.is_local, self.source = alone, forward.is_local, stage - 1 if source is None else source
        self._contracts: dict[Hashable, Contract] = {}

    @property
    def stages(self) -> tuple[int, int]:
        """The stages between which it lies."""
        return self.source, self.stage

    def knows(self, signature: Hashable) -> bool:
        return signature in self._contracts

    def agreed(self, signature: Hashable) -> Contract | None:
        return self._contracts.get(signature)

    def post(self, signature: Hashable, what: str) -> tuple[Contract, AnyReceipt]:
        """Start receiving the values for a run; the first time, wait for the header."""
        contract = self._contracts.get(signature)
        if contract is None:
            values, units, is_void = self.forward.receive_object(f"{what} (header)")
            contract = Contract(values, units, () if is_void else None, is_new=not self.alone, is_void=is_void)
            if not self.dynamic_shapes:
                self._contracts[signature] = contract
        return contract, self.forward.post(contract.metas(contract.travelling()), what)

    def answer(self, run: StageRun, contract: Contract) -> None:
        """After the first run of a signature, tell the earlier stage which values were needed."""
        if contract.needed is None:
            assert run.needed is not None
            contract.needed = run.needed
            self.backward.send_object(contract.needed)

    def give(self, signature: Hashable, contract: Contract) -> None:
        """What somebody else found out for a signature."""
        self._contracts[signature] = contract

    def answer_void(self, contract: Contract) -> None:
        """This stage cannot run: nothing is needed, and no gradient will come back."""
        if contract.needed is None:
            contract.needed, contract.is_void = (), True
            self.backward.send_object(contract.needed)

    def send_gradients(self, inbox: ReceivedValues, contract: Contract) -> None:
        """Send back the gradients of what was received."""
        self.backward.send(inbox.take_gradients(contract), contract.metas(contract.with_gradient()))

    def forget(self) -> None:
        """Let go of all that was agreed."""
        self._contracts.clear()

    def settle(self) -> None:
        """Before a step: let go of what was sent before the last one."""
        _grow_old(self._contracts)
        self.backward.settle()


def undescribable(stage: int, to: str, error: Exception) -> str:
    """What a stage's units return does not pickle."""
    return (
        f"What the modules of stage {stage} return cannot be described to {to}: {error}. Return tensors, numbers,"
        " strings, None and tuples, lists or dicts of them."
    )


def _grow_old(contracts: Mapping[Hashable, Contract]) -> None:
    """A step has passed: from now on only what is needed travels."""
    for contract in contracts.values():
        contract.is_new = False


__all__ = ["Contract", "ReceivedValues", "RecvBoundary", "SendBoundary"]
