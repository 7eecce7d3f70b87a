"""Where a stage begins: the Phantoms among its first block's arguments become values.

The one idea: an argument is what was sent in its place, or is computed from units' results that were sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline.partition.layout import Unit
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.pipeline.phantoms.stand_in import Leaf
from lightning_parallel.pipeline.stage import calls
from lightning_parallel.pipeline.stage.stage_values import StageValues
from lightning_parallel.pipeline.transport.tensor_meta import realize


class NotSent(PhantomError):
    """An argument of the first block is neither there nor can it be computed."""


class StageEntry:
    """The first block's arguments, call by call.

    Args:
        stage: which stage begins.
        stage_values: what came in.
        made_for: see `StageRun`.

    Attributes:
        needed: positions of the arguments that were Phantoms and came in their places, in order.
        by_position: units' results among them.
        lent: other stages' parameters among them, and their values.
    """

    def __init__(self, stage: int, stage_values: StageValues, made_for: Collection[int]) -> None:
        self.stage, self.stage_values, self._made_for = stage, stage_values, made_for
        self.needed: tuple[int, ...] | None = () if stage == 0 else None
        self.by_position: set[Leaf] = set()
        self.lent: list[tuple[ForeignParameter, Tensor]] = []
        self._grad = torch.is_grad_enabled()
        self._starts = [0]  # leaves of the arguments before the first call, the second one, ...

    def enter(self, unit: Unit, arguments: Any, before_this: int, replaying: bool, finding: bool) -> None:
        """Bind the Phantoms among arguments of a call to what was sent, or to what that gives.

        Raises:
            NotSent: that is not possible (for the first call, or where calls are being found out).
            PhantomError: they carry gradients where there shall be none.
        """
        inputs, is_first = self.stage_values.inputs, not before_this
        lacking = self._lacking(arguments, before_this, replaying)
        sent = {p: x for p, x in lacking.items() if is_first and p in inputs and p not in self._made_for}
        self._bind(sent)
        unknown = {p: x for p, x in lacking.items() if p not in sent and realize(x, self.stage_values.fetch) is None}
        missing = [str(leaf.origin) for position, leaf in unknown.items() if position not in inputs]
        if missing and (is_first or finding):
            raise NotSent(calls.not_sent(unit, self.stage, missing))
        self._bind({position: leaf for position, leaf in unknown.items() if position in inputs})
        needed = {p: x for p, x in lacking.items() if p in inputs and (p in sent or p in unknown)}
        taken = lacking if is_first else needed
        carry_gradients = any(x.value is not None and x.value.requires_grad for x in taken.values())
        if self._grad and not torch.is_grad_enabled() and carry_gradients:
            raise PhantomError(calls.without_gradients(unit, self.stage))
        if not replaying:
            self.needed = (*(self.needed or ()), *needed)

    def _bind(self, sent: Mapping[int, Phantom]) -> None:
        """Let Phantoms stand for what was sent in their places."""
        for position, phantom in sent.items():
            value = self.stage_values.inputs[position]
            phantom.bind(value)
            if phantom.leaf is not None:
                self.stage_values.put(phantom.leaf, value)
                self.by_position.add(phantom.leaf)
            if isinstance(phantom, ForeignParameter):
                self.lent.append((phantom, value))

    def _lacking(self, arguments: Any, before_this: int, replaying: bool) -> dict[int, Phantom]:
        """The Phantoms among the arguments, by position; positions go on from call to call."""
        leaves, start = tree_flatten(arguments)[0], self._starts[before_this]
        lacking: dict[int, Phantom] = {}
        for position, leaf in enumerate(leaves, start):
            if isinstance(leaf, Phantom) and leaf.value is None and not any(leaf is x for x in lacking.values()):
                lacking[position] = leaf
        if not replaying:
            self._starts.append(start + len(leaves))
        return lacking
