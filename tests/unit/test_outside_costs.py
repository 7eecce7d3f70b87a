"""What a forward costs outside of its units, on a clock that the model's own code moves on, and which stage has it."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.pipeline.partition.blocks import unit_names
from lightning_parallel.pipeline.planning import timing
from lightning_parallel.pipeline.planning.auto import Wanted, choose_for, measure
from lightning_parallel.pipeline.planning.loads import MeasuredLoads
from lightning_parallel.pipeline.planning.outside_costs import OutsideCosts, outside_costs
from lightning_parallel.pipeline.planning.timing import UnitCost
from lightning_parallel.pipeline.schedules.placement import straight

ROWS, CLASSES, CPU = 3, 4, torch.device("cpu")
clock = SimpleNamespace(now=0.0)


class Spending(torch.autograd.Function):
    """The same, after so many seconds of the clock; its backward takes ten times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds, clock.now = seconds, clock.now + seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        clock.now += 10 * ctx.seconds
        return gradient, None


class Model(nn.Module):
    """Four blocks with code before them, behind the first and the third, and a loss; a bare parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(4))
        self.bias = nn.Parameter(torch.ones(CLASSES))
        self.register_buffer("scale", torch.ones(CLASSES))
        self.example_input_array = {
            "x": torch.ones(ROWS, CLASSES),
            "labels": torch.tensor([0, 1, 3]),
        }

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        clock.now += 1 + 0 * random.random()
        x = Spending.apply(self.blocks[0](x), 2)
        x = self.blocks[2](self.blocks[1](x))
        x = Spending.apply(x + self.bias * self.scale, 3)
        return Spending.apply(F.cross_entropy(self.blocks[3](x), labels), 4)


@pytest.fixture
def _own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))


@pytest.mark.usefixtures("_own_clock")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_piece_is_timed_behind_its_unit(device):
    model, states = Model().to(device), (torch.get_rng_state(), random.getstate())
    found = outside_costs(model, unit_names(model, 2), CPU, "a test")
    assert found.untold == ""
    assert found.before == UnitCost(1.0)
    expected = {"blocks.0": (2, 20), "blocks.1": (0, 0), "blocks.2": (3, 30), "blocks.3": (4, 40)}
    for name, (forward, backward) in expected.items():
        cost = found.behind[name]
        assert (cost.forward, cost.backward, cost.input_grad, cost.weight_grad) == (forward, backward, backward, 0)
    # The loss saves the logarithms of shares, float32, and how many rows it was the mean of.
    assert {name: cost.saved for name, cost in found.behind.items()} == {
        "blocks.0": 0, "blocks.1": 0, "blocks.2": 0, "blocks.3": ROWS * CLASSES * 4 + 4,
    }  # fmt: skip
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert all(p.grad is None for p in model.parameters()) and model.blocks[0].forward.__func__ is nn.Linear.forward


class ReadsWeights(Model):
    """Multiplies by a unit's weight itself."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.linear(super().forward(x, labels) * x, self.blocks[0].weight)


def test_what_cannot_be_timed_is_told():
    model = ReadsWeights()
    loads = measure(model, Wanted(2, 4, partition="count"), CPU, lambda nbytes: 0.0)
    assert loads(straight(2)).costs.forward == pytest.approx(
        [sum(loads.units[f"blocks.{i}"].forward for i in pair) for pair in ((0, 1), (2, 3))]
    )
    reason = choose_for(loads, Wanted(2, 4, partition="count")).reason
    assert "forward and back, without what runs outside of units (RuntimeError: " in reason


def test_stages_cost_what_is_computed_on_them():
    """Every stage computes what comes before the first unit, and each what lies behind its own units."""
    model = Model()
    names = tuple(unit_names(model, 2))
    one = UnitCost(1.0, 2.0, 1.0, 1.0, 8.0, 4.0)
    behind = {"blocks.0": UnitCost(2.0, 4.0, 4.0), "blocks.3": UnitCost(5.0, 7.0, 7.0, saved=16.0)}
    outside = {names: OutsideCosts(UnitCost(0.5), behind)}
    units, nbytes = dict.fromkeys(names, one), dict.fromkeys(names, 1)
    load = MeasuredLoads(model, "auto", "count", None, units, nbytes, lambda nbytes: 0.0, outside)(straight(2))
    assert (load.costs.forward, load.costs.backward) == ([4.5, 7.5], [8.0, 11.0])
    assert (load.costs.input_grad, load.costs.weight_grad) == ([6.0, 9.0], [2.0, 2.0])
    assert (load.kept, load.weight_share) == ([16.0, 32.0], [0.5, 0.25])


@pytest.mark.usefixtures("_own_clock")
def test_measured_stages_have_it():
    loads = measure(Model(), Wanted(2, 4, partition="count"), CPU, lambda nbytes: 0.0)
    assert loads(straight(2)).costs.forward == [1 + 2, 1 + 3 + 4]
    assert loads(straight(2)).costs.backward == [20, 30 + 40]
    assert choose_for(loads, Wanted(2, 4, partition="count")).seconds == dict.fromkeys(unit_names(Model(), 2), 0.0)
