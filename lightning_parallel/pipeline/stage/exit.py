"""Where a stage ends: the arguments of the next stage's first block, and units' results, are what may be sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.phantoms.phantom import Phantom, bound
from lightning_parallel.pipeline.phantoms.stand_in import Leaf, version_of
from lightning_parallel.pipeline.stage.stage_values import Place, StageValues
from lightning_parallel.pipeline.transport.tensor_meta import realize


class StageExit:
    """What may be sent, call by call of the next stage's first block.

    Args:
        stage_values: what came in and what units made.

    Attributes:
        outputs: leaves of the arguments by position, and units' results by `Leaf`; None before the first call.
        wanted_for: what of earlier units was needed for nothing but an output, by its position.
    """

    def __init__(self, stage_values: StageValues) -> None:
        self.stage_values = stage_values
        self.outputs: dict[Place, Any] | None = None
        self.wanted_for: dict[int, tuple[Leaf, ...]] = {}
        self._left = 0  # leaves of the arguments so far

    def values_of(self, leaves: Sequence[Any]) -> list[Any]:
        """What is sent of a call's arguments; Phantoms stay where there is no value."""
        return [self._value_of(leaf, position) for position, leaf in enumerate(leaves, self._left)]

    def _value_of(self, leaf: Any, position: int) -> Any:
        """An argument's value, or nothing where the next stage can compute it."""
        stage_values = self.stage_values
        if not isinstance(leaf, Phantom):
            return leaf
        if (
            leaf.value is None
            and stage_values.keep is not None
            and not stage_values.learn
            and position not in stage_values.keep
        ):
            return None
        wanted, stage_values.wanted, noted = stage_values.wanted, {}, list[Phantom]()
        value = realize(leaf, stage_values.fetch, noted)
        if (
            stage_values.wanted and stage_values.keep is not None and stage_values.learn
        ):  # the next stage may compute it itself
            self.wanted_for[position] = tuple(stage_values.wanted)
            for phantom in noted:
                phantom.value = None
        else:
            wanted |= stage_values.wanted
        stage_values.wanted = wanted
        return bound(leaf) if value is None else value

    def watched(self, leaves: Sequence[Any]) -> list[Any]:
        """Values that are sent when the step has gone on. It may write into them; copies, where nothing saves them."""
        kept = [x if torch.is_grad_enabled() or not isinstance(x, Tensor) else x.clone() for x in leaves]
        versions = ((i, version_of(x)) for i, x in enumerate(kept, self._left) if isinstance(x, Tensor))
        self.stage_values.versions.update(versions)
        return kept

    def note(self, leaves: Sequence[Any]) -> None:
        """A call has been made; or, without arguments, a unit has returned something behind one."""
        self.outputs = self.outputs or {}
        self.outputs.update(enumerate(leaves, self._left))
        self.outputs.update(self.stage_values.aside.items())
        self._left += len(leaves)
