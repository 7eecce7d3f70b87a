"""What the stages of a schedule cost and keep: equal parts of a model, or each what its own units were measured to.

The one idea: how many stages there are and which ranks are neighbours is the schedule's business, so a load is asked
for by the placement of stages on rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from lightning_parallel.pipeline.costs import Costs, PerStage
from lightning_parallel.pipeline.partition.blocks import block_names
from lightning_parallel.pipeline.partition.layout import Partition, StageLayout, lay_out
from lightning_parallel.pipeline.planning.outside_costs import OutsideCosts
from lightning_parallel.pipeline.planning.timing import UnitCost

Placement = Mapping[tuple[int, int], int]  # of (replica, stage) on rows


@dataclass(frozen=True)
class StageLoad:
    """What the stages of one placement cost a micro-batch.

    Args:
        costs: their times, and those of transfers.
        kept: what the forward of each stage keeps for its backward, in any unit.
        weight_share: M_W / M_B of each stage, see `peak_activations`.
    """

    costs: Costs
    kept: Sequence[float]
    weight_share: Sequence[float]

    @property
    def largest(self) -> float:
        """What the stage keeps that keeps most."""
        return max(self.kept)

    @property
    def largest_share(self) -> float:
        """The M_W / M_B of the stage of which W needs most; 1 where nothing is kept."""
        return max(self.weight_share) or 1.0


Loads = Callable[[Placement], StageLoad]


def even_loads(costs: Costs, num_ranks: int, weight_share: float = 1.0) -> Loads:
    """Stages that are even parts of what is given for each rank's share; memory in activations of a share.

    Args:
        costs: see `costs_of_stages`.
        num_ranks: D.
        weight_share: M_W / M_B.
    """

    def load(placement: Placement) -> StageLoad:
        count = num_stages(placement)
        times = costs_of_stages(costs, num_ranks, count)
        return StageLoad(times, [num_ranks / count] * count, [weight_share] * count)

    return load


@dataclass(frozen=True)
class MeasuredLoads:
    """Stages as a pipeline will cut them, each with the measured costs of its own units; memory in bytes.

    Args:
        model: which is cut.
        blocks, partition, stages: see `lay_out`.
        units: what each unit costs a micro-batch.
        nbytes: what each block is called with, in bytes.
        hops: seconds of a transfer of so many bytes.
        outside: what a forward costs outside of units, by the units' names in order of registration.

    Raises:
        ValueError: when called, the model cannot be cut into so many stages.
    """

    model: nn.Module
    blocks: str | Sequence[str]
    partition: Partition
    stages: Mapping[str, int] | None
    units: Mapping[str, UnitCost]
    nbytes: Mapping[str, int]
    hops: Callable[[int], float]
    outside: Mapping[tuple[str, ...], OutsideCosts] = field(default_factory=dict)
    _layouts: dict[int, StageLayout] = field(default_factory=dict, compare=False)

    def __call__(self, placement: Placement) -> StageLoad:
        count = num_stages(placement)
        layout = self._layout(count)
        outside = self._outside_of(layout)
        of_stage = [outside.before] * count
        for unit in layout.units:
            of_stage[unit.stage] += self.units[unit.name] + outside.behind.get(unit.name, UnitCost())
        costs = Costs(
            [cost.forward for cost in of_stage],
            [cost.input_grad for cost in of_stage],
            [cost.weight_grad for cost in of_stage],
            [cost.backward for cost in of_stage],
            communication=self._transfers(placement, layout),
        )
        shares = [cost.waiting / cost.saved if cost.saved else 0.0 for cost in of_stage]
        return StageLoad(costs, [cost.saved for cost in of_stage], shares)

    def _layout(self, count: int) -> StageLayout:
        if count not in self._layouts:
            self._layouts[count] = lay_out(self.model, count, self.blocks, self.partition, self.stages, self.seconds)
        return self._layouts[count]

    @property
    def seconds(self) -> dict[str, float]:
        """Of F and B of every unit, as `lay_out` takes them."""
        return {name: cost.forward + cost.backward for name, cost in self.units.items()}

    def untold(self, count: int) -> str:
        """Why it is not known what is computed outside of the units of so many stages; empty where it is."""
        return self._outside_of(self._layout(count)).untold

    def _outside_of(self, layout: StageLayout) -> OutsideCosts:
        return self.outside.get(tuple(unit.name for unit in layout.units), OutsideCosts())

    def boundaries(self, count: int) -> list[int]:
        """Bytes that travel between each two neighbours of so many stages."""
        names = block_names(self.model, count, self.blocks)
        return [self.nbytes[names[bound]] for bound in self._layout(count).bounds[1:-1]]

    def _transfers(self, placement: Placement, layout: StageLayout) -> dict[tuple[int, int], float]:
        """Seconds between rows, forwards and back; the longest where several boundaries lie between two rows."""
        seconds = [self.hops(nbytes) for nbytes in self.boundaries(layout.num_stages)]
        found: dict[tuple[int, int], float] = {}
        for (replica, stage), row in placement.items():
            if stage + 1 < layout.num_stages:
                other = placement[replica, stage + 1]
                for pair in ((row, other), (other, row)):
                    found[pair] = max(found.get(pair, 0.0), seconds[stage])
        return found


def num_stages(placement: Placement) -> int:
    """How many stages are placed."""
    return 1 + max(stage for _, stage in placement)


def costs_of_stages(costs: Costs, num_ranks: int, num_stages: int) -> Costs:
    """Costs of D equal pieces of a model, or of D different ones, as costs of S pieces.

    Within a piece the cost is taken to be even.

    Args:
        costs: one number, the same for each of the D pieces, or one a piece.
        num_ranks: D.
        num_stages: S.

    Example:
        >>> costs_of_stages(Costs(forward=[1.0, 3.0]), num_ranks=2, num_stages=4).forward
        [0.5, 0.5, 1.5, 1.5]
    """

    def cut(cost: PerStage) -> PerStage:
        if not isinstance(cost, Sequence):
            return cost * num_ranks / num_stages
        return list(_cut(cost, num_stages))

    backward = None if costs.backward is None else cut(costs.backward)
    pair = None if costs.pair is None else costs.pair * num_ranks / num_stages
    forward, input_grad, weight_grad = cut(costs.forward), cut(costs.input_grad), cut(costs.weight_grad)
    return replace(costs, forward=forward, input_grad=input_grad, weight_grad=weight_grad, backward=backward, pair=pair)


def _cut(cost: Sequence[float], num_stages: int) -> Iterator[float]:
    """The integral of a function that is constant on each of ``len(cost)`` pieces, over each of ``num_stages``."""
    pieces = len(cost)
    for stage in range(num_stages):
        low, high = stage * pieces / num_stages, (stage + 1) * pieces / num_stages
        yield sum(cost[at] * max(0.0, min(high, at + 1) - max(low, at)) for at in range(pieces))
