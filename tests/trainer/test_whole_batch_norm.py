"""Batch norms by the statistics of the whole batch, in pipelines and over copies, are one process's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.strategies import HybridStrategy, PipelineStrategy, ZeROStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import (
    Case,
    Record,
    assert_parity,
    assert_ranks_agree,
    failure_of,
    fit,
    join_as_torchrun,
    one_process,
)

BATCH = {"batch_norm": "batch", "schedule": "gpipe"}
FOUR = {"max_steps": 4, "precision": "64-true", "val_check_interval": 2}  # norms divide rounding by spreads
SIZES = (8, 8, 8, 8)
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


class Tabular(Classifier):
    """Norms of every kind, one of them frozen, and dropout that draws nothing."""

    def __init__(self) -> None:
        kinds: list[dict[str, Any]] = [{}, {"momentum": None}, {"affine": False}, {"momentum": 0.3}]
        layers: list[nn.Module] = []
        for options in kinds:
            layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, **options), nn.ReLU(inplace=True)]
        super().__init__(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)))

    def on_train_epoch_start(self) -> None:
        self.net[10].eval()


class Untracked(Classifier):
    """Norms that look at the batch in evaluations, too."""

    def __init__(self) -> None:
        norm = lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)  # noqa: E731
        super().__init__(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), norm(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, CLASSES)
            )
        )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm_one(self.one(x)), inplace=True)
        return F.relu(x + self.norm_two(self.two(h)))


class SmallResNet(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential())
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.blocks, self.head = nn.ModuleList(Residual(4) for _ in range(4)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x[:, None, None].expand(-1, -1, 4, -1) ** 2))
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean((2, 3)))


def case(make: Callable[[], Classifier], **strategy: Any) -> Case:
    return Case(make, lambda: row_loader(SIZES), {**BATCH, **strategy}, FOUR)


def test_a_tabular_network_with_norms_is_one_process():
    assert_parity(case(Tabular), (2,), CLOSE, CLOSE)


def test_norms_without_running_statistics_are_one_process_in_evaluations_too():
    assert_parity(case(Untracked), (2,), CLOSE, CLOSE)


@pytest.mark.parametrize(
    "recompute", ["none", pytest.param("block", marks=pytest.mark.slow), pytest.param("stage", marks=pytest.mark.slow)]
)
def test_a_residual_network_is_one_process(recompute: str):
    assert_parity(case(SmallResNet, recompute=recompute), (2,), CLOSE, CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_microbatches": 3}, {"num_microbatches": 1}, {"num_microbatches": 8}])
def test_micro_batches_of_any_size_and_one_stage(options: dict[str, Any]):
    assert_parity(case(Tabular, **options), (1, 2), CLOSE, CLOSE)


def test_split_backwards_whose_forwards_come_first():
    text = "0F0 0F1 0I0 0I1 0W0 0W1 / 1F0 1F1 1I0 1I1 1W0 1W1"
    assert_parity(case(Tabular, schedule=Schedule.from_text(text), num_microbatches=None), (2,), CLOSE, CLOSE)
