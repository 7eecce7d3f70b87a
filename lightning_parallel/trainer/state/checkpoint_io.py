"""How checkpoints of our strategies reach the disk: whole or not at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parallel.checkpoint import files

# Before version 2.6 Lightning reads whole checkpoints, objects and all, and has no argument to say otherwise.
_ALWAYS_TRUSTS = "weights_only" not in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's files, written beside their place and renamed, read as needed; remote paths are Lightning's.

    A process that is killed while it saves leaves the old file whole (Lightning's own plugin moves a file from the
    folder for temporary files, which is a copy where that is another disk).
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            files.write(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Callable | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, **given(weights_only))
        return files.read_checkpoint(Path(path), map_location or "cpu", as_lightning_reads(weights_only))


def leave_weights(checkpoint: dict[str, Any]) -> None:
    """Make a checkpoint one of weights alone, where the optimizer's state has ended with the ranks of the run."""
    if "optimizer_states" in checkpoint:
        rank_zero_warn(
            "The ranks of this run have ended, and their optimizer's state with them: trainer.save_checkpoint writes"
            " weights alone, from which no training resumes. ModelCheckpoint(save_last=True) writes all, while it runs."
        )
    for name in ("optimizer_states", "lr_schedulers"):
        checkpoint.pop(name, None)


def as_lightning_reads(weights_only: bool | None) -> bool | None:
    """What an argument that was left out means to this version of Lightning."""
    return False if _ALWAYS_TRUSTS else weights_only


def given(weights_only: bool | None) -> dict[str, Any]:
    """The argument for Lightning's methods, which take it from version 2.6 on; False is what they did before."""
    is_default = weights_only is None or (_ALWAYS_TRUSTS and not weights_only)
    return {} if is_default else {"weights_only": weights_only}


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)
