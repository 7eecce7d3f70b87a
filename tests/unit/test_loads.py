"""What stages cost as a pipeline will cut them, and which schedule is chosen for that."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.planning.auto import Wanted, choose_for, measure
from lightning_parallel.pipeline.planning.choice import CANDIDATES, choose
from lightning_parallel.pipeline.planning.loads import MeasuredLoads, StageLoad
from lightning_parallel.pipeline.planning.splits import merge_useless_splits
from lightning_parallel.pipeline.planning.timing import UnitCost
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.schedules.placement import straight
from lightning_parallel.pipeline.simulator import peak_activations, simulate

SIZES = (8, 8, 8, 64)  # bytes that each of four blocks is called with


def unit(seconds: float) -> UnitCost:
    """F, I and W of so many seconds, B of twice as many; as many bytes kept as microseconds, W needs a half."""
    return UnitCost(seconds, 2 * seconds, seconds, seconds, 1e6 * seconds, 5e5 * seconds)


def loads(seconds: tuple[float, ...] = (1.0, 1.0, 1.0, 3.0), partition: Any = "count") -> MeasuredLoads:
    """Blocks that cost so, of a chain whose last one gets more; a transfer takes a hundredth of a second a byte."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in seconds))
    units = {str(i): unit(cost) for i, cost in enumerate(seconds)}
    nbytes = {str(i): size for i, size in enumerate(SIZES)}
    return MeasuredLoads(model, "auto", partition, None, units, nbytes, lambda nbytes: nbytes / 100)


def test_each_stage_costs_what_its_own_units_cost():
    load = loads()(straight(2))
    assert load.costs.forward == load.costs.input_grad == load.costs.weight_grad == [2.0, 4.0]
    assert load.costs.backward == [4.0, 8.0]
    assert load.kept == [2e6, 4e6] and load.weight_share == [0.5, 0.5]
    assert load.costs.communication == {(0, 1): 0.08, (1, 0): 0.08}


def test_the_cut_is_the_pipelines():
    """ "time" balances what was measured, a list says it; each boundary is where that cut lies."""
    assert loads(partition="time")(straight(2)).costs.forward == [3.0, 3.0]
    assert loads(partition="time")(straight(2)).costs.communication == {(0, 1): 0.64, (1, 0): 0.64}
    assert loads(partition=[1, 3])(straight(2)).costs.forward == [1.0, 5.0]


def test_several_stages_a_rank_have_their_own_cut_and_their_own_boundaries():
    """A V on two rows: stages 0 and 3 on the first, the boundary between 1 and 2 crosses none."""
    load = loads()(make("zb_v", 2, 4).placement)
    assert load.costs.forward == [1.0, 1.0, 1.0, 3.0]
    assert load.costs.communication == {(0, 1): 0.64, (1, 0): 0.64, (1, 1): 0.08}
    assert load.costs.hop(1, 1) == 0.0


def test_memory_is_that_of_the_stages():
    schedule = make("1f1b", 2, 4)  # holds 2 micro-batches of stage 0, 1 of stage 1
    assert peak_activations(schedule, 1.0, [2.0, 4.0]) == [4, 4]
    split = Schedule.from_text("0F0 0I0 0F1 0I1 0W0 0W1 / 1F0 1I0 1F1 1I1 1W0 1W1")  # a W is left when the next F comes
    assert peak_activations(split, [0.5, 0.25], [2.0, 4.0]) == [2 * 1.5, 4 * 1.25]


def by_hand(name: str, load: Mapping[int, Costs]) -> float:
    """The step of a schedule that is cut into D or 2 D stages."""
    schedule = make(name, 2, 4)
    return simulate(merge_useless_splits(schedule, load[schedule.num_stages]), load[schedule.num_stages]).makespan


def test_the_fastest_is_chosen_among_schedules_that_are_cut_otherwise():
    """Two stages of 2 and 4 keep a rank waiting; of four, 1 and 3 lie together in a V."""
    hop2, hop4 = {(0, 1): 0.08, (1, 0): 0.08}, {(0, 1): 0.64, (1, 0): 0.64}
    times = {
        2: Costs([2.0, 4.0], [2.0, 4.0], [2.0, 4.0], [4.0, 8.0], communication=hop2),
        4: Costs(
            [1.0, 1.0, 1.0, 3.0], [1.0, 1.0, 1.0, 3.0], [1.0, 1.0, 1.0, 3.0], [2.0, 2.0, 2.0, 6.0], communication=hop4
        ),
    }
    choice = choose(2, 4, loads())
    found = {option.name: option.timeline.makespan for option in choice.candidates if option.timeline is not None}
    for name in ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v"):
        assert found[name] == pytest.approx(by_hand(name, times)), name
    assert simulate(choice.schedule, times[choice.schedule.num_stages]).makespan == min(
        option.timeline.makespan for option in choice.candidates if not option.excuse
    )
    told = {option.name: option.excuse for option in choice.candidates}
    assert "needs at least 6 blocks" in told["interleaved_1f1b:v=3"] and len(told) == len(CANDIDATES)


def test_a_limit_is_one_of_bytes():
    needed = max(peak_activations(make("naive", 2, 4), 0.5, [2e6, 4e6]))
    choice = choose_for(loads(), Wanted(2, 4, memory_limit=needed))
    assert max(peak_activations(choice.schedule, 0.5, loads()(choice.schedule.placement).kept)) <= needed
    assert f"of {needed:g}" in choice.reason
    assert choice.reason.endswith("forward and back")


def test_stages_of_unequal_times_are_told():
    choice = choose_for(loads(partition=[2, 2]), Wanted(2, 4))
    assert choice.reason.endswith("its stages take 6 to 12 forward and back")
    assert choice.schedule.num_stages == 2  # what a list of two stages allows


class Widening(nn.Module):
    """Four blocks of which the last is the widest; none but the first is called with 8 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 256))
        self.example_input_array = torch.zeros(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_units_of_all_cuts_and_boundaries_of_all_sizes_are_measured():
    asked: list[int] = []
    model = Widening()
    measured = measure(
        model, Wanted(2, 4, partition="count"), torch.device("cpu"), lambda nbytes: asked.append(nbytes) or 1e-3
    )
    assert set(measured.units) == {f"blocks.{i}" for i in range(4)}
    assert measured.nbytes == {"blocks.0": 3 * 8 * 4, **{f"blocks.{i}": 3 * 16 * 4 for i in (1, 2, 3)}}
    load: StageLoad = measured(straight(2))
    assert asked == [3 * 16 * 4] and load.costs.communication == {(0, 1): 1e-3, (1, 0): 1e-3}
    [outside] = measured.outside.values()
    cost = {name: unit.forward + outside.behind[name].forward for name, unit in measured.units.items()}
    expected = [outside.before.forward + sum(cost[f"blocks.{i}"] for i in pair) for pair in ((0, 1), (2, 3))]
    assert load.costs.forward == pytest.approx(expected)
    choice = choose_for(measured, Wanted(2, 4, partition="count"))
    assert asked == [3 * 16 * 4]  # once a size
    assert choice.schedule.num_ranks == 2
