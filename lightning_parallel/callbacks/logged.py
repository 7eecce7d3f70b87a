"""How monitors log what they measured in a step: to every logger at once, and where other callbacks look for values.

The one idea: `LightningModule.log` is made for values of steps, which are averaged and synchronised; a monitor's two
dozen numbers are the same on every rank, and to send them through it took longer than to measure them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch import Trainer


def log_measured(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Log numbers that all ranks have alike, at the optimizer step that has just ended; every rank calls it."""
    # Doubles, since floats cannot tell bytes apart beyond 16 MiB; on the CPU, where nothing waits for a device.
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()}
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    for logger in trainer.loggers if metrics else ():
        logger.log_metrics(dict(metrics), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
