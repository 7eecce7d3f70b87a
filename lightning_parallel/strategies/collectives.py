"""Lightning's collectives, by what it means by them.

The one idea: "all processes" is the mesh, which is waited for on the host; "all processes that see different rows" is
the data axis, and ranks of one model copy hold the same value. Barriers have a group of their own, so that what a rank
alone sends there is not taken for something else.
"""

from __future__ import annotations

import warnings
import zlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch.strategies.strategy import TBroadcast


class MeshCollectives(ParallelStrategy):
    """The collectives of a strategy whose ranks form a mesh."""

    _barriers: Any = None  # the group of barriers; None is the default one

    @property
    def is_connected(self) -> bool:
        """Whether the ranks of a run are connected."""
        raise NotImplementedError

    def axis_size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        raise NotImplementedError

    def group(self, *axes: str) -> Any:
        """The process group of this rank's line along an axis, or of its plane along several."""
        raise NotImplementedError

    def blocked(self, what: str) -> AbstractContextManager[None]:
        """A context for what waits for other ranks."""
        raise NotImplementedError

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the mesh, on the host.

        Raises:
            ValueError: others wait at a barrier of another name.
        """
        if not dist.is_initialized():
            return
        mark = zlib.crc32((name or "").encode())
        marks = torch.tensor([mark, -mark])
        with self.blocked(f"the other ranks to call strategy.barrier({'' if name is None else repr(name)}) too"):
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._barriers)
        if marks[0] != -marks[1]:
            self._refuse_barriers(name)

    def _refuse_barriers(self, name: str | None) -> None:
        names: list[Any] = [None] * dist.get_world_size()
        with self.blocked("the names of the other ranks' barriers"):
            dist.all_gather_object(names, name or "", group=self._barriers)
        who = "; ".join(f"rank {rank} at {other!r}" for rank, other in enumerate(names))
        raise ValueError(
            f"Ranks wait for each other at different barriers: {who}. Every rank has to call strategy.barrier() at the"
            " same places, not rank 0 alone."
        )

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Give every rank of the mesh the object of rank `src`."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        with self.blocked(f"an object of rank {src}"):
            dist.broadcast_object_list(box, src, device=torch.device("cpu"))
        return box[0]

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce over ranks that saw different rows: the data axis. Ranks of one model copy hold the same value. Before
        and after a run there is this process alone."""
        if not self.is_connected:
            return tensor
        if group is None and self.axis_size("data") == 1:
            return tensor
        group = self.group("data") if group is None else group
        if not isinstance(tensor, Tensor):
            return tensor
        with self.blocked("the other ranks' value, to reduce it"):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data axis; a single model copy gives its tensor back, as one process does, and so does a
        process before and after a run."""
        if not self.is_connected:
            return tensor
        group = None if group is dist.group.WORLD else group  # what `LightningModule.all_gather` passes
        if group is None and self.axis_size("data") == 1:
            return tensor
        group = self.group("data") if group is None else group
        if not sync_grads:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            with self.blocked("the other ranks' tensors"):
                dist.all_gather(parts, tensor.detach().contiguous(), group=group)
            return torch.stack(parts)
        with warnings.catch_warnings():  # PyTorch has deprecated what Lightning calls
            warnings.filterwarnings("ignore", message=r"torch\.distributed\.nn\.functional", category=FutureWarning)
            return super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) ranks of the mesh say yes, agreed on the host."""
        if not dist.is_initialized():
            return decision
        vote = torch.tensor(int(decision))
        with self.blocked("the other ranks' decision"):
            dist.all_reduce(vote, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(vote)
