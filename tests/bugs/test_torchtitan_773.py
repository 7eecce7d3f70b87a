"""Zero bubble with activation checkpointing took ten times as long: each half of a backward ran the forward again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_same, many_on_stages, one_process

MICROBATCHES = 4


class Counted(nn.Linear):
    """Counts how often it computes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Counts(Classifier):
    """Eight blocks of two layers that count anew in every step."""

    def __init__(self) -> None:
        blocks = [nn.Sequential(Counted(WIDTH, WIDTH), nn.Tanh(), Counted(WIDTH, WIDTH)) for _ in range(8)]
        super().__init__(nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES)))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for layer in self.modules():
            if isinstance(layer, Counted):
                layer.calls = 0


def calls_of_last_step(trainer: Any, module: Counts) -> Tensor:
    return torch.tensor([layer.calls for layer in module.modules() if isinstance(layer, Counted)])


@pytest.mark.parametrize("recompute", ["none", "block", "stage"])
def test_a_forward_runs_once_more_and_not_once_for_each_half(recompute: str):
    case = Case(
        Counts,
        row_loader,
        {"recompute": recompute, "num_microbatches": MICROBATCHES, "check_loss": False},
        validate=False,
        at_end=calls_of_last_step,
    )
    reference = one_process(case)
    schedules = ("1f1b", "zb_h1", "zb_v")
    runs = many_on_stages([case.but({"schedule": schedule}) for schedule in schedules], 2)
    times = 1 if recompute == "none" else 2
    for records in runs:
        assert_same(records, reference)
        assert sum(record.extra for record in records).tolist() == [times * MICROBATCHES] * 16
