"""One row of a thousand that reads another is found and named; a router that jumps at one token is none."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.pipelines import Case, assert_parity, failure_of, many_on_stages

ROWS, READS, READ = 1000, 700, 3
X = torch.randn(3, ROWS, 8, generator=torch.Generator().manual_seed(0))


class Leaks(LightningModule):
    """A small part of row 3 is added to row 700, if both are there, in front of one layer."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        for i, layer in enumerate(self.net):
            if i == self.at:
                source = (x * (batch["id"] == READ)[:, None]).sum(0)
                x = torch.where((batch["id"] == READS)[:, None], x + 0.05 * source, x)
            x = layer(x).tanh()
        return (x - 1).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LeaksInside(Leaks):
    """The same within a layer of its own."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.net[1] = Reads()


class Reads(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if len(x) <= READS:
            return made
        return made + 0.05 * (torch.arange(len(x)) == READS)[:, None] * made[READ]


class Jumps(Leaks):
    """A router between two experts, whose score of one row of the first batch lies within rounding of its threshold."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.net[0] = Router()


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        whole, parts = (torch.cat([self.score(x) for x in X[0].split(size)]).double() for size in (ROWS, ROWS // 4))
        row = int((whole - parts).abs().argmax())
        self.threshold = float(min(whole[row], parts[row]))

    def score(self, x: Tensor) -> Tensor:
        """The sum of each row; of fewer rows in another order, as kernels do."""
        return sum((x if len(x) > ROWS // 2 else x.flip(1)).unbind(1), torch.zeros(len(x)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (expert(x) for expert in self.experts)
        return torch.where((self.score(x) > self.threshold)[:, None], first, first + 0.05 * second)


def rows() -> DataLoader:
    return DataLoader([{"x": x, "id": torch.arange(ROWS)} for x in X], batch_size=None)  # 1,000 rows as they are


@pytest.mark.parametrize("make", [lambda: Leaks(1), LeaksInside], ids=["between", "inside"])
def test_a_row_that_reads_another_is_found_by_stage_and_row(make: Any):
    text = failure_of(Case(make, rows, {"num_microbatches": 4}, validate=False), 2)
    assert "Stage 0 (`net.0` to `net.1`) hands on other values for the whole batch of 1000 rows" in text
    assert "1 of 1000 rows are others, the first is row 700." in text and "Use num_microbatches=1" in text


def test_in_the_last_stage_it_is_found_at_the_loss():
    text = failure_of(Case(lambda: Leaks(3), rows, {"num_microbatches": 4}, validate=False), 2)
    assert "The loss of the whole batch is" in text


def test_it_trains_uncut():
    assert_parity(Case(lambda: Leaks(1), rows, {"num_microbatches": 1}, validate=False), stages=(2,))


def test_a_router_that_jumps_for_rounding_is_no_fault():
    router = Router()
    whole, parts = router(X[0]), torch.cat([router(x) for x in X[0].split(ROWS // 4)])
    assert int(((whole - parts).abs() > 1e-3).any(1).sum()) == 1
    records = many_on_stages([Case(Jumps, rows, {"num_microbatches": 4}, validate=False)], 2)[0]
    assert all(len(record.losses) == 3 for record in records)


class NeedsFloat32(Jumps):
    """Cannot compute in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = OnlyFloat32()


class OnlyFloat32(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("this kernel takes float32")
        return super().forward(x)


def test_what_cannot_be_told_from_rounding_is_warned_of_with_the_row():
    text = failure_of(Case(NeedsFloat32, rows, {"num_microbatches": 4}, validate=False), 2)  # a warning is an error
    assert "1 of 1000 rows are others, the first is row" in text
    assert "this kernel takes float32" in text and "check_loss=False skips this comparison" in text
