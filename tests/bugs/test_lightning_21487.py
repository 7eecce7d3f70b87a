"""Lightning broadcasts from rank 0 before every batch where there is a default process group: all step together.

https://github.com/Lightning-AI/pytorch-lightning/issues/21487
"""

import multiprocessing

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import make_trainer

_fork = multiprocessing.get_context("fork")


class Held(Classifier):
    """Rank 0 is held in its second step until rank 1 has made all of its own."""

    done = _fork.Event()

    def training_step(self, batch, batch_idx):
        assert not dist.is_initialized()
        if self.global_rank == 0 and batch_idx == 1:
            assert self.done.wait(30), "rank 1 waits for rank 0"
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 5:
            self.done.set()


@pytest.mark.timeout(50)
def test_a_worker_finishes_its_epoch_while_another_is_held():
    torch.manual_seed(0)
    trainer = make_trainer(ParameterServerStrategy("async"), 2, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Held(), row_loader((4,) * 6), row_loader((5,)))
    assert Held.done.is_set(), "rank 1 made its last step"
