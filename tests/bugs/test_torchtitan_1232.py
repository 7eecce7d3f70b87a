"""The loss was shown as -1 or None on rank 0, because another rank held the last stage."""

from typing import Any

from torch import Tensor

from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


class Logs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


def test_rank_0_shows_the_loss_and_all_ranks_hold_it():
    for record in assert_parity(Case(Logs, lambda: row_loader((8, 5)), trainer={"max_epochs": 2})):
        assert record.losses[0] > 0
        assert record.metrics[0]["bar/loss_step"] == record.losses[0] == record.metrics[0]["callback/loss_step"]
        assert {"callback/loss_epoch", "logged/loss_epoch", "bar/loss_epoch"} <= record.final.keys()
