"""What two stages agreed to send each other for one input signature: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_parallel.pipeline.stage.calls import ONCE, StopRule
from lightning_parallel.pipeline.stage.stage_run import UnitOutputs
from lightning_parallel.pipeline.stage.stage_values import Place
from lightning_parallel.pipeline.transport.tensor_meta import TensorMeta

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
