"""Sparse gradients of an embedding: refused in words where they would be sent, and used where workers step."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import VOCABULARY, token_loader
from tests.trainer.pipelines import make_trainer
from tests.trainer.servers import OWN_ROWS, assert_equal

pytestmark = pytest.mark.timeout(60)


class Sparse(LightningModule):
    def __init__(self, optimizer=torch.optim.SGD):
        super().__init__()
        self.embedding, self.optimizer = nn.Embedding(VOCABULARY, 4, sparse=True), optimizer

    def training_step(self, batch, batch_idx):
        return self.embedding(batch["input_ids"]).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), 0.1)


def run(strategy, devices, **options):
    torch.manual_seed(1)
    module = Sparse(**options)
    make_trainer(strategy, devices, max_epochs=1, **OWN_ROWS).fit(module, token_loader())
    return module


@pytest.mark.parametrize("options", [{}, {"update": "worker", "island_size": 2}], ids=str)
def test_sparse_gradients_are_not_sent(options):
    with pytest.raises(
        ValueError, match=r"A gradient of shape \(11, 4\) is sparse .* Use sparse=False in nn.Embedding"
    ):
        run(ParameterServerStrategy(**options), 2)


def test_workers_step_with_sparse_gradients():
    """Both have the same rows, so that the mean of what they changed is what one process changes."""
    ours = run(ParameterServerStrategy(update="worker"), 2, optimizer=torch.optim.SparseAdam)
    assert_equal(ours, run("auto", 1, optimizer=torch.optim.SparseAdam), rtol=1e-6, atol=1e-7)
