"""Values that workers without a process group share: reductions, running statistics, metrics.

The one idea: everybody gets everybody's value and computes the same from it, in the order of ranks. Left out: how
values travel (``parameter_server/trainer/coordination/run_coordinator_client.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
}


def combined(values: Sequence[Tensor], reduce_op: Any = "mean") -> Tensor:
    """One tensor of several of one shape, as `torch.distributed` would reduce them.

    Args:
        values: at least one.
        reduce_op: "mean", "avg", "sum", "max", "min", a `ReduceOp`, or None for the mean.

    Example:
        >>> combined([torch.tensor(1.0), torch.tensor(3.0)]), combined([torch.tensor(1), torch.tensor(3)], "sum")
        (tensor(2.), tensor(4))
    """
    word = str(reduce_op or "mean").lower().rpartition(".")[2]
    stacked = torch.stack(list(values))
    if word in _BY_NAME:
        return _BY_NAME[word](stacked)
    mean = stacked.to(torch.get_default_dtype() if not stacked.is_floating_point() else stacked.dtype).mean(0)
    return mean if stacked.is_floating_point() else mean.to(stacked.dtype)


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds, by name."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


@torch.no_grad()
def average_into(buffers: Mapping[str, Tensor], everyone: Sequence[Mapping[str, Tensor]]) -> None:
    """Set floating-point buffers to the mean over workers, others to the first worker's.

    Where all workers have the same value it stays the same bits.
    """
    first = everyone[0]
    for name, buffer in buffers.items():
        if buffer.is_floating_point():
            difference = sum(other[name] - first[name] for other in everyone) / len(everyone)
            buffer.copy_(first[name] + difference)
        else:
            buffer.copy_(first[name])


class MetricGather:
    """What a torchmetrics object calls to get every worker's state; copies of a metric share it."""

    def __init__(self, gather: Callable[[Tensor], list[Tensor]], may_wait: Callable[[], bool]) -> None:
        self._gather, self.may_wait = gather, may_wait

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [value.to(tensor.device) for value in self._gather(tensor)]

    def __deepcopy__(self, memo: Any) -> MetricGather:
        return self


def connect_metrics(module: nn.Module, gather: MetricGather) -> Callable[[], None]:
    """Have the module's metrics add up over workers where they compute outside of steps; returns what undoes it."""
    found = [m for m in module.modules() if isinstance(m, Metric) and m.dist_sync_fn is None]
    before = [metric.distributed_available_fn for metric in found]
    for metric in found:
        metric.dist_sync_fn, metric.distributed_available_fn = gather, gather.may_wait

    def undo() -> None:
        for metric, available in zip(found, before, strict=True):
            metric.dist_sync_fn, metric.distributed_available_fn = None, available

    return undo
