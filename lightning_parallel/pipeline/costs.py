"""What the actions of a schedule cost: seconds (or any unit) by kind and stage, and by hop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_parallel.pipeline.schedule import Action

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Duration of every kind of action, one number for all stages or one a stage, and of one transfer.

    Args:
        forward: T_F, time of F.
        input_grad: T_I, time of I.
        weight_grad: T_W, time of W.
        backward: T_B, time of B. Left out, I and W together.
        update: time of U.
        communication: time from the end of an action until its result is on another row; one number, or one for
            each (source row, destination row), 0 where it is left out. A result used on its own row costs nothing.
        pair: T_F&B, time of a forward and a backward (or of two forwards) that a schedule pairs (``Schedule.paired``)
            and that run as one: both start when both have their inputs, both results are there at the end. Left out,
            the two run one after the other, each with its own input and result.

    Example:
        >>> costs = Costs(forward=[1.0, 2.0], communication=0.5)
        >>> costs.of(Action("F", stage=1, microbatch=0)), costs.of(Action("B", stage=1, microbatch=0))
        (2.0, 2.0)
        >>> costs.hop(0, 1), costs.hop(1, 1)
        (0.5, 0.0)
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    backward: PerStage | None = None
    update: PerStage = 0.0
    communication: float | Mapping[tuple[int, int], float] = 0.0
    pair: float | None = None

    def of(self, action: Action) -> float:
        """Time that ``action`` keeps its row busy."""
        stage = action.stage
        if action.kind == "B" and self.backward is None:
            return _at(self.input_grad, stage) + _at(self.weight_grad, stage)
        by_kind = {"F": self.forward, "I": self.input_grad, "W": self.weight_grad, "B": self.backward, "U": self.update}
        cost = by_kind[action.kind]
        assert cost is not None
        return _at(cost, stage)

    def hop(self, source: int, target: int) -> float:
        """Time of a transfer from row ``source`` to row ``target``; it runs beside computation."""
        if source == target:
            return 0.0
        if isinstance(self.communication, Mapping):
            return float(self.communication.get((source, target), 0.0))
        return float(self.communication)


def _at(cost: PerStage, stage: int) -> float:
    if isinstance(cost, Sequence):
        if stage >= len(cost):
            raise ValueError(f"Costs are given for {len(cost)} stages, and the schedule has stage {stage}.")
        return float(cost[stage])
    return float(cost)
