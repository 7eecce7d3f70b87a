"""Activation checkpoints by block, and where their inputs wait for the backward: here, on the host, or cut over ranks.

The one idea: a checkpointed block keeps its input alone and computes the rest again. That input passes through
autograd's hooks for saved tensors, so a context around the block decides where it waits. Between data-parallel ranks
there is nothing to partition: each has an input of its own. Ranks of a tensor axis hold equal inputs, of which each may
keep a part (`ShardedInputs`, P_a of the paper). Left out: arguments that are passed by name, which stay where they are.

Source:
    Rajbhandari et al., ZeRO, arXiv 1910.02054, section 6.1 (P_a and P_a+cpu).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_parallel.zero.collectives import Traffic, all_gather_parts

Keep = Callable[[], AbstractContextManager[Any]]
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class ActivationCheckpoints:
    """Blocks that keep their inputs alone from forward to backward.

    Args:
        blocks: modules, none inside another.
        keep: makes the context in which a block's input is saved.

    Example:
        >>> block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> checkpoints = ActivationCheckpoints([block])
        >>> block(torch.ones(1, 2)).sum().backward(); block[0].weight.grad is not None
        True
        >>> checkpoints.remove(); "forward" in vars(block)
        False
    """

    def __init__(self, blocks: Iterable[nn.Module], keep: Keep = nullcontext) -> None:
        self.blocks, self.keep = list(blocks), keep
        for block in self.blocks:
            block.forward = self._checkpointed(block, block.forward)

    def _checkpointed(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with self.keep():
                return checkpoint(
                    forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), statistics_kept(block)),
                    **kwargs,
                )  # fmt: skip

        return run

    def remove(self) -> None:
        """Blocks run as they did."""
        for block in self.blocks:
            vars(block).pop("forward", None)


@contextmanager
def statistics_kept(block: nn.Module) -> Iterator[None]:
    """While a block is computed again: its norms have counted the batch already, and count it in copies now.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with statistics_kept(norm):
        ...     _ = norm(torch.ones(3, 2))
        >>> norm.num_batches_tracked.item(), norm.running_mean.tolist()
        (0, [0.0, 0.0])
    """
    norms = [m for m in block.modules() if isinstance(m, _NormBase) and m.training]
    kept = [{n: s for n in _STATISTICS if (s := norm._buffers.get(n)) is not None} for norm in norms]
    for norm, statistics in zip(norms, kept, strict=True):
        norm._buffers.update({name: statistic.clone() for name, statistic in statistics.items()})
    try:
        yield
    finally:
        for norm, statistics in zip(norms, kept, strict=True):
            norm._buffers.update(statistics)


def on_host(device: torch.device) -> Keep:
    """Inputs wait in the host's memory, pinned beside a GPU."""
    return partial(save_on_cpu, pin_memory=device.type == "cuda")


class ShardedInputs(saved_tensors_hooks):
    """Of what is saved inside, each rank of a group keeps an equal part; the whole is gathered when it is needed.

    Every rank has to hold the same values and to run its backwards in the same order.

    Args:
        group: of the ranks with equal inputs; None are all.
        traffic: counts what is gathered.
    """

    def __init__(self, group: Any = None, traffic: Traffic | None = None) -> None:
        self.group, self.traffic = group, traffic if traffic is not None else Traffic()
        super().__init__(self._cut, self._join)

    def _cut(self, tensor: Tensor) -> Any:
        if not tensor.numel() or not tensor.is_floating_point() or isinstance(tensor, nn.Parameter):
            return tensor
        part = -(-tensor.numel() // dist.get_world_size(self.group))
        begin = min(part * dist.get_rank(self.group), tensor.numel())
        own = tensor.new_zeros(part)
        values = tensor.detach().reshape(-1)[begin : begin + part]
        own[: values.numel()].copy_(values)
        return own, tensor.shape

    def _join(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        own, shape = kept
        whole = own.new_empty(own.numel() * dist.get_world_size(self.group))
        all_gather_parts(whole, own, self.group, self.traffic).wait()
        return whole[: shape.numel()].view(shape)
