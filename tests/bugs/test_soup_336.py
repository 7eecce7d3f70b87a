"""A stage held no parameter of one of the optimizer's groups, or no parameter at all."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_ranks_agree, assert_same, many_on_stages, one_process


class Grouped(Classifier):
    """Norms in one group, weights in another, biases in a third; the last stage has no norm, the middle one nothing."""

    def __init__(self) -> None:
        layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)]
        super().__init__(nn.Sequential(*layers))

    def configure_optimizers(self) -> Any:
        norms = list(self.net[1].parameters())
        weights = [p for p in self.parameters() if p.ndim == 2]
        biases = [p for n, p in self.named_parameters() if n in ("net.0.bias", "net.3.bias")]
        groups = [
            {"params": norms, "weight_decay": 0.0, "name": "norms"}, {"params": weights, "name": "weights", "lr": 0.01},
            {"params": biases, "name": "biases"},
        ]  # fmt: skip
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


@pytest.mark.parametrize("partition", [[2, 1, 1], [1, 1, 2]])
def test_groups_and_stages_without_parameters(partition: list[int], tmp_path):
    case = Case(Grouped, row_loader, {"partition": partition})
    [records] = many_on_stages([case], 3)
    assert_same(records, one_process(case))


def test_learning_rates_have_the_same_keys_on_all_ranks(tmp_path):
    monitors: list[LearningRateMonitor] = []

    def callbacks() -> list[LearningRateMonitor]:
        monitors.append(LearningRateMonitor("step"))
        return monitors[-1:]

    case = Case(
        Grouped, row_loader, {"partition": [2, 1, 1]}, {"callbacks": callbacks, "logger": CSVLogger(tmp_path)},
        at_end=lambda trainer, module: dict(monitors[-1].lrs),
    )  # fmt: skip
    [records] = many_on_stages([case], 3)
    assert_ranks_agree(records)
    assert records[0].extra.keys() == {"lr-AdamW/norms", "lr-AdamW/weights", "lr-AdamW/biases"}
    assert records[0].extra == records[1].extra == records[2].extra == one_process(case).extra
