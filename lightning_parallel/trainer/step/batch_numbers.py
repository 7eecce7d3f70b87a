"""Which batch a step is on: its number within its epoch, and one for the random streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule

from lightning_parallel.pipeline.stage.random_streams import mix

_KINDS = ("training", "validation", "test", "predict")


def batch_number(module: LightningModule, kind: str, args: Sequence[Any], index: int) -> int:
    """A number for the random streams that no other step of this run has."""
    trained = module.trainer.fit_loop.epoch_loop.total_batch_idx
    if kind == "training":
        return 2 * trained
    loader = next((arg for arg in args[1:2] if isinstance(arg, int)), 0)
    return 2 * mix(_KINDS.index(kind), trained, index, loader) + 1


def batch_index(module: LightningModule, training: bool) -> int:
    """Number of the batch within its epoch; a step that does not take `batch_idx` is not told."""
    trainer = module.trainer
    if training:
        return trainer.fit_loop.epoch_loop.batch_idx
    loop: Any = trainer._active_loop
    return loop.batch_progress.current.ready - 1 if hasattr(loop, "batch_progress") else 0
