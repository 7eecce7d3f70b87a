"""Frozen weights were missing from checkpoints and random after a resume; frozen layers crashed stage 2 (4055)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from tests.trainer.modules import Classifier, row_dataset
from tests.trainer.zeros import EACH, Fit, on_ranks


class Frozen(Classifier):
    """Its first layer does not train; one buffer is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)


def one_batch() -> Any:
    return row_dataset(8, 4)


def saves(path: Path) -> Any:
    def save(trainer: Any, module: LightningModule) -> Any:
        trainer.save_checkpoint(path)
        return {name: value.clone() for name, value in module.state_dict().items()}

    return save


@pytest.mark.parametrize("strategy", EACH)
def test_every_parameter_and_buffer_is_saved_and_resumed(tmp_path: Path, strategy: Any):
    path = tmp_path / "frozen.ckpt"
    [first] = on_ranks([(Fit(Frozen, {"max_epochs": 2}, one_batch, after=saves(path)), strategy)], 2)
    saved = torch.load(path, weights_only=False)["state_dict"]
    torch.manual_seed(1)
    made = Frozen().state_dict()
    assert saved.keys() == made.keys()
    assert torch.equal(saved["net.0.weight"], made["net.0.weight"])
    assert float(saved["seen"]) == 2.0
    assert all(torch.equal(saved[name], value) for name, value in first[0].extra.items())
    resumed = Fit(Frozen, {"max_epochs": 3}, one_batch, after=lambda _, module: module.state_dict(), resume=path)
    [second] = on_ranks([(resumed, strategy)], 2)
    assert torch.equal(second[1].extra["net.0.weight"], made["net.0.weight"])
    assert not torch.equal(second[1].extra["net.2.weight"], saved["net.2.weight"])
