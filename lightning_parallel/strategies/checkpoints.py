"""What strategies that save one file or a folder have in common: the choice, and how a folder is written.

The one idea: "full" is one process's file, which a strategy's ranks gather; "sharded" a folder to which each adds its
part. What a rank's part is, is the strategy's business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import Optimizer

from lightning_parallel.checkpoint.sharded import save_sharded
from lightning_parallel.strategies.arguments import refuse_arguments
from lightning_parallel.strategies.base import MeshStrategy
from lightning_parallel.trainer.state.checkpoint_io import leave_weights


class FileOrFolder(MeshStrategy):
    """A strategy that saves one file or a folder.

    Args:
        state_dict_type: "full" or "sharded".
        **kwargs: see `MeshStrategy`.

    Raises:
        ValueError: `state_dict_type` is another word.
    """

    def __init__(self, state_dict_type: Literal["full", "sharded"] = "full", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        right = state_dict_type in ("full", "sharded")
        refuse_arguments(self, state_dict_type=(state_dict_type, right, '"full" or "sharded"'))
        self.state_dict_type = state_dict_type

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write what Lightning dumped; all ranks call it.

        Raises:
            ValueError: a folder is to be written to a place that is no path of the hosts' file systems.
        """
        assert self.lightning_module is not None
        if self.state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if "://" in str(filepath):
            raise ValueError(
                f'{filepath} is remote, but state_dict_type="sharded" writes a folder that all hosts see. Give a path'
                ' of a shared file system, or use state_dict_type="full".'
            )
        self.raise_failure()
        if self.ranks_have_ended:
            leave_weights(checkpoint)
        with self.connected():
            names = names_of_state(self.lightning_module)
            save_sharded(checkpoint, names, Path(filepath), self.barrier, self._written)

    def _written(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Of values by their names in a folder those that this rank writes."""
        return flat


def names_of_state(module: nn.Module) -> list[str]:
    """The keys of a module's state dict, for which no parameter is read: one that is divided has no values."""
    return list(module.state_dict(keep_vars=True))


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, without what Lightning may have put around it."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
