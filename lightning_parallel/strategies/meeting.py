"""`MeetingStrategy`: ranks without a process group, which meet at a hub outside of steps and nowhere else.

The one idea: what Lightning means by collectives is answered by the hub, from everybody's values; within a step nobody
waits. Left out: what ranks do in steps; that is the subclass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_parallel.parameter_server.trainer.coordination.run_coordinator_client import (
    RunCoordinatorClient,
    first_of,
)
from lightning_parallel.parameter_server.trainer.shared_values import combined
from lightning_parallel.strategies.base import MeshStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies.strategy import TBroadcast

# Hooks within a step, in which no worker waits for another.
_IN_STEP = {
    "training_step", "optimizer_step", "backward", "configure_gradient_clipping", "lr_scheduler_step",
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device",
}  # fmt: skip


class MeetingStrategy(MeshStrategy):
    """A strategy whose ranks see different rows and have a line to a hub each."""

    _line: RunCoordinatorClient | None = None

    def open_line(self, line: RunCoordinatorClient) -> None:
        """Called by the launcher in a worker's process, before anything else."""
        self._line = line

    def axes(self) -> Mapping[str, int]:
        return {"data": self.world_size}

    def axis_size(self, axis: str) -> int:
        return self.world_size if axis == "data" else 1

    def axis_rank(self, axis: str) -> int:
        return self.global_rank if axis == "data" else 0

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @contextmanager
    def saving(self, trainer: Trainer) -> Iterator[str]:
        """Several workers save nothing: servers end with the failure, and each worker is in a step of its own."""
        if self.world_size == 1:
            with super().saving(trainer) as why:
                yield why
            return
        yield self.why_nothing_is_saved

    @property
    def why_nothing_is_saved(self) -> str:
        """Why several workers have no state to save once the run has failed."""
        return (
            f"the servers of {type(self).__name__} end with a run that fails, and the state of the optimizer with them"
        )

    # -- what Lightning means by collectives ---------------------------------------------------------------------------

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _in_step(self) -> bool:
        return getattr(self._module, "_current_fx_name", None) in _IN_STEP

    def _meet(self, what: str, value: Any = None) -> dict[int, Any]:
        """Wait for all workers that are still there, after having gone out of everybody's way."""
        assert self._line is not None
        self._step_aside()
        return self._line.meet(what, value)

    def _step_aside(self) -> None:
        """Hold nobody up while this rank waits."""

    def everyone(self, value: Any) -> list[Any]:
        """The values of all workers that are still there, in the order of ranks; every worker calls it."""
        return [value] if self._line is None else list(self._meet("values of all", value).values())

    def all_gathered(self, tensor: Tensor) -> list[Tensor]:
        """Every worker's tensor, of any shapes."""
        return [other.to(tensor.device) for other in self.everyone(tensor.detach().cpu())]

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Give every worker the object of rank `src`."""
        if self._line is None:
            return obj
        return first_of(self._meet(f"an object of rank {src}", obj if self.global_rank == src else None), src)

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce over workers; in a step it is the worker's own value, since there nobody waits."""
        if not isinstance(tensor, Tensor) or self._line is None or self._in_step:
            return tensor
        return combined(self.all_gathered(tensor), reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over workers, waiting for all of them even in a step.

        Raises:
            ValueError: gradients are to go through it, which no worker sends.
        """
        if sync_grads and self.world_size > 1 and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{type(self).__name__}: all_gather(sync_grads=True) would have no gradient, since workers send each"
                " other no gradients of values. Use ZeROStrategy(stage=1), where it has one process's, or gather with"
                " sync_grads=False what needs none."
            )
        return tensor if self.world_size == 1 else torch.stack(self.all_gathered(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) workers say yes; all stop at one clock."""
        votes = self.everyone(decision)
        return min(votes) if all else max(votes)
