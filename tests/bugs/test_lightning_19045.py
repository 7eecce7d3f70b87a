"""A monitored value existed on one rank only: saving raised there, and the ranks parted."""

from os.path import basename
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import Case, many_on_stages, one_process


class Worsens(Classifier):
    """Logs only where logits exist, and gets worse from the third epoch on."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        if logits.requires_grad or logits.shape[-1] == 3:
            self.log("val", (logits.sum() * 0 + abs(self.current_epoch - 1.0)), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


def decisions(trainer: Trainer, module: LightningModule) -> tuple:
    stopping, saving = trainer.early_stopping_callback, trainer.checkpoint_callback
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    return (
        trainer.current_epoch,
        stopping.stopped_epoch,
        float(stopping.best_score),
        basename(saving.best_model_path),
        round(lr, 9),
    )


def test_every_rank_decides_alike(tmp_path):
    def callbacks(folder: str = "ranks") -> list:
        saving = ModelCheckpoint(
            tmp_path / folder, "{epoch}-{val}", monitor="val", save_top_k=1, enable_version_counter=False
        )
        return [EarlyStopping("val", patience=2), saving]

    options = {"max_epochs": 9, "callbacks": callbacks, "enable_checkpointing": True}
    case = Case(Worsens, row_loader, trainer=options, at_end=decisions)
    [records] = many_on_stages([case], 2)
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == ["epoch=1-val=0.0.ckpt"]
    alone = one_process(case.but(trainer={"callbacks": lambda: callbacks("alone")}))
    assert records[0].extra == records[1].extra == alone.extra
    assert records[0].extra[1] == 3
