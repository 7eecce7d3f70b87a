"""BatchNorm counted every micro-batch, and the run that only asks for shapes, as a batch of data."""

import torch
from torch import nn

from tests.trainer.modules import CLASSES, Classifier, row_loader
from tests.trainer.pipelines import Case, on_stages, one_process


class ConvNet(Classifier):
    """A BatchNorm on the first stage, fed by the batch itself, and one on the second."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.BatchNorm1d(6, momentum=None),
                nn.Linear(6, 6),
                nn.BatchNorm1d(6),
                nn.ReLU(inplace=True),
                nn.Linear(6, CLASSES),
            )
        )


def test_running_statistics_take_one_step_a_batch():
    case = Case(ConvNet, lambda: row_loader((8, 8, 8)), trainer={"num_sanity_val_steps": 2})
    reference = one_process(case)
    for num_stages in (2, 4):
        record = on_stages(case, num_stages)[0]
        for norm in ("net.0", "net.2"):
            assert record.weights[f"{norm}.num_batches_tracked"] == 3
        for name in ("running_mean", "running_var"):  # of the batches themselves: exactly one process's
            torch.testing.assert_close(record.weights[f"net.0.{name}"], reference.weights[f"net.0.{name}"])
