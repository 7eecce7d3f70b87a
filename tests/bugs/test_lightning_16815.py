"""A resume on another number of ranks failed on sizes that no longer fitted; five rows over two ranks fit nobody
evenly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from tests.trainer.modules import WIDTH, Classifier, row_dataset
from tests.trainer.pipelines import LOSS
from tests.trainer.zeros import EACH, Fit, fit, on_ranks


class FiveRows(Classifier):
    """A weight of five rows, and state of the optimizer to cut with it."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def run(epochs: int, after: Any = None, resume: Any = None) -> Fit:
    options = {"max_epochs": epochs, "use_distributed_sampler": False, "limit_val_batches": 0}
    return Fit(FiveRows, options, lambda: row_dataset(8, 4), after, resume)


def saves(path: Path) -> Any:
    def save(trainer: Any, module: LightningModule) -> None:
        trainer.save_checkpoint(path)

    return save


@pytest.mark.parametrize("strategy", EACH)
def test_the_next_losses_are_the_same(tmp_path: Path, strategy: Any):
    path = tmp_path / "two.ckpt"
    reference = fit(run(2), "auto", 1).losses[2:]
    on_ranks([(run(1, saves(path)), strategy)], 2)
    torch.testing.assert_close(fit(run(2, resume=path), "auto", 1).losses, reference, **LOSS)
    [results] = on_ranks([(run(2, resume=path), strategy)], 4)
    for result in results:
        torch.testing.assert_close(result.losses, reference, **LOSS)
