"""The state of a run with servers as one process has it, there and back.

The one idea: weights and the optimizer's state are the servers'; what they have at one moment, when nobody pushes, is
made into what one process would write. Left out: sharded checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.parameter_server.from_torch import optimizer_state
from lightning_parallel.parameter_server.trainer.filter_residuals import KEY, left_behind
from lightning_parallel.parameter_server.trainer.sandblaster.batch_worker import BatchWorker
from lightning_parallel.strategies.checkpoints import unwrapped
from lightning_parallel.strategies.server_steps import ServerSteps
from lightning_parallel.zero.optimizer.guarded_state import exposed


class ServerStates(ServerSteps):
    """A strategy whose checkpoints are made of what servers have."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, of one version on every worker; every worker calls it."""
        if self.worker is not None:
            self.synchronize()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """One process's optimizer state, made of the servers'; every worker calls it, rank 0 gets it."""
        optimizer = unwrapped(optimizer)
        if isinstance(self.worker, BatchWorker):
            return self._state_together(self.worker, optimizer)
        if self.worker is None or self._line is None or self._plan is None or not self._plan.has_optimizer_on_servers:
            return super().optimizer_state(optimizer)
        self._meet("the optimizer's state")
        copies = self._line.ask("copies") if self.global_rank == 0 else None
        self._meet("the optimizer's state, read")
        with exposed(optimizer):
            return optimizer.state_dict() if copies is None else optimizer_state(self._plan.table, copies, optimizer)

    def _state_together(self, worker: BatchWorker, optimizer: Optimizer) -> dict[str, Any]:
        assert self._line is not None
        self._meet("the optimizer's state")
        state = worker.state(self._line.ask("copies")) if self.global_rank == 0 else {}
        self._meet("the optimizer's state, read")
        return optimizer.state_dict() | {"state": state}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write what Lightning dumped, and what every worker's filters left behind; every worker calls it."""
        if self.worker is not None and "optimizer_states" in checkpoint:
            filters = self.worker.session.client.filters
            own = None if filters is None else left_behind(filters, self.worker.table)
            if self.wishes.filters:
                checkpoint[KEY] = {"left_behind": [other for other in self.everyone(own) if other is not None]}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights that a run begins with.

        Raises:
            ValueError: servers hold the weights by now, as where a learning rate finder ends within a run.
        """
        if self.worker is not None:
            raise ValueError(
                f"{type(self).__name__} cannot restore weights while it trains (a learning rate finder behind the first"
                " epoch does): the servers hold them, and have moved on. Restore before fit (LearningRateFinder, which"
                " runs when fit starts, Tuner.lr_find, fit(ckpt_path=...)), or use ZeROStrategy(stage=1)."
            )
        super().load_model_state_dict(checkpoint, strict)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._left_behind = checkpoint.get(KEY, {}).get("left_behind", [])
        return checkpoint
