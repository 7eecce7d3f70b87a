"""The two collectives ZeRO lives on, and a record of what they moved.

The one idea: one place calls them, so that one place counts them. Bytes are the paper's: the whole vector that is
scattered or gathered, whatever a backend sends for it (gloo reduces and scatters by an all-reduce).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Newer versions of PyTorch have other names for both. They are looked up when called: measurements replace them.
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@dataclass
class Traffic:
    """Bytes and calls by collective since the last `clear`."""

    nbytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def note(self, collective: str, nbytes: int) -> None:
        """Count one call."""
        self.nbytes[collective] = self.nbytes.get(collective, 0) + nbytes
        self.calls[collective] = self.calls.get(collective, 0) + 1

    def clear(self) -> None:
        """Begin anew."""
        self.nbytes.clear()
        self.calls.clear()

    @property
    def moved(self) -> int:
        """All bytes in the paper's way of counting: an all-reduce is a reduce-scatter and an all-gather."""
        return sum((2 if name == "all_reduce" else 1) * nbytes for name, nbytes in self.nbytes.items())


def reduce_scatter_mean(out: Tensor, whole: Tensor, group: Any, traffic: Traffic) -> Any:
    """Begin to average `whole` [N k] over the ranks; `out` [k] gets this rank's part. `out` may lie in `whole`.

    Returns:
        What to `wait` for.
    """
    traffic.note("reduce_scatter", whole.nbytes)
    if whole.device.type == "cuda":
        return getattr(dist, _REDUCE_SCATTER)(out, whole, op=dist.ReduceOp.AVG, group=group, async_op=True)
    whole.div_(dist.get_world_size(group))  # before the sum, as DistributedDataParallel does
    return getattr(dist, _REDUCE_SCATTER)(out, whole, group=group, async_op=True)


def all_gather_parts(whole: Tensor, part: Tensor, group: Any, traffic: Traffic) -> Any:
    """Begin to fill `whole` [N k] with every rank's part [k]. `part` may lie in `whole`.

    Returns:
        What to `wait` for.
    """
    traffic.note("all_gather", whole.nbytes)
    return getattr(dist, _ALL_GATHER)(whole, part, group=group, async_op=True)


def average(tensor: Tensor, group: Any, traffic: Traffic) -> None:
    """Average in place over the ranks of a group."""
    traffic.note("all_reduce", tensor.nbytes)
    dist.all_reduce(tensor.div_(dist.get_world_size(group)), group=group)


def average_together(tensors: Iterable[Tensor], group: Any, message_bytes: int, device: torch.device) -> None:
    """Average in place over the ranks of a group, in messages of so many bytes or of one tensor.

    Args:
        tensors: alike on all ranks in number, shape and dtype; on the device or the host.
        group: whose ranks average.
        message_bytes: up to how many neighbours of one dtype are sent together.
        device: where the group's messages lie.
    """
    for alike in _messages(tensors, message_bytes):
        together = torch.cat([tensor.reshape(-1) for tensor in alike]).to(device)
        average(together, group, Traffic())
        parts = zip(_split_as(together, alike), alike, strict=True)
        torch._foreach_copy_(alike, [part.view_as(tensor) for part, tensor in parts])


def _messages(tensors: Iterable[Tensor], nbytes: int) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to so many bytes."""
    message: list[Tensor] = []
    for tensor in tensors:
        if message and (message[0].dtype != tensor.dtype or sum(t.nbytes for t in (*message, tensor)) > nbytes):
            yield message
            message = []
        message.append(tensor)
    if message:
        yield message


def broadcast_all(tensors: list[Tensor], group: Any, source: int) -> None:
    """Give every rank the source's values, in place; `source` is a global rank."""
    for tensor in tensors:
        with torch.no_grad():
            dist.broadcast(tensor.detach(), source, group=group)


def broadcast_together(tensors: list[Tensor], group: Any, source: int) -> None:
    """Give every rank the source's values, in place, with one message for each dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for alike in by_dtype.values():
        together = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(together, source, group=group)
        torch._foreach_copy_(alike, [p.view_as(t) for p, t in zip(_split_as(together, alike), alike, strict=True)])


def _split_as(together: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return together.split([tensor.numel() for tensor in tensors])
