"""`nn.TransformerEncoder` nests padded rows in evaluation, which neither stages nor cut layers can take."""

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import TensorParallelStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, Record, assert_parity, assert_same, fit, join_as_torchrun, one_process

FEATURES, POSITIONS = 8, 3
# One process does nest them.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Padded(Classifier):
    """Rows as sequences, longer where the first number is positive; norms behind sums, as is torch's default."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 16, 0.0, batch_first=True)
        super().__init__(nn.TransformerEncoder(layer, 4))
        self.inlet, self.head = nn.Linear(WIDTH // POSITIONS, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(POSITIONS) > 1 + (x[:, :1] > 0)
        encoded = self.net(self.inlet(x.unflatten(1, (POSITIONS, -1))), src_key_padding_mask=padding)
        return self.head(encoded[:, 0])


# A key's bias moves all scores of a query alike: its gradient is rounding, and rounds otherwise in parts.
KEYS = {"self_attn.in_proj_bias": slice(FEATURES, 2 * FEATURES)}


def test_stages_take_padded_rows():
    assert_parity(Case(Padded, row_loader, strategy={"stages": {"inlet": 0}}), stages=[2], leave_out=KEYS)


def test_cut_layers_take_padded_rows():
    case = Case(Padded, row_loader)

    def run(rank: int, port: int) -> Record:
        join_as_torchrun(rank, 2, port)
        return fit(case, TensorParallelStrategy(), 2)

    assert_same(run_ranks(run, 2, free_port(), group=False), one_process(case), leave_out=KEYS)
