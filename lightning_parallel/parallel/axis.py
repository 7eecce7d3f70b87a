"""The ranks along a tensor axis, and the three collectives that tensor parallelism lives on.

The one idea: one place calls them, by torch.distributed's own names, so that measurements see them; on one rank they
do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Newer versions of PyTorch have other names for both. They are looked up when called: measurements replace them.
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Sum:
    """An all-reduce on its way.

    Args:
        work: torch.distributed's word for it; None where there is nothing to wait for.
        blocked: a context entered while this process waits.
    """

    def __init__(self, work: Any, blocked: Callable[[], AbstractContextManager[None]]) -> None:
        self._work, self._blocked = work, blocked

    def wait(self) -> None:
        """From here on (on a GPU: on this stream) the sum is there."""
        if self._work is not None:
            with self._blocked():
                self._work.wait()


class TensorAxis:
    """This rank's line along the tensor axis.

    Args:
        rank, size: this rank's place along the axis, and how many ranks it has.
        group: gives their process group as it is at the moment; None is the default one.
        waiting: a context entered while the host waits for the other ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: Callable[[], Any] = lambda: None,
        waiting: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext(),
    ) -> None:
        self.rank, self.size, self._group, self._waiting = rank, size, group, waiting

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        return self

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sum (or `op`) over the axis in place; `x` is dense and contiguous. Returns it."""
        if self.size > 1:
            with self._blocked(x):
                dist.all_reduce(x, op=op, group=self._group())
        return x

    def begin_all_reduce(self, x: Tensor) -> Sum:
        """Begin to sum over the axis in place; `x` is dense and contiguous, nobody's until it is there."""
        work = dist.all_reduce(x, group=self._group(), async_op=True) if self.size > 1 else None
        return Sum(work, partial(self._blocked, x))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's `x` [.., k, ..] one behind the other along `dim`: [.., size k, ..]."""
        if self.size == 1:
            return x
        whole = x.new_empty((self.size, *x.shape))
        with self._blocked(x):
            getattr(dist, _ALL_GATHER)(whole.flatten(0, 1) if x.dim() else whole, x.contiguous(), group=self._group())
        return whole[0] if not x.dim() else torch.cat(whole.unbind(0), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """The sum of every rank's `x` [.., size k, ..], of which this rank gets its part along `dim`: [.., k, ..]."""
        if self.size == 1:
            return x
        parts = torch.stack(x.chunk(self.size, dim))
        out = torch.empty_like(parts[0])
        with self._blocked(x):
            getattr(dist, _REDUCE_SCATTER)(out, parts.flatten(0, 1), group=self._group())
        return out

    def broadcast(self, x: Tensor) -> None:
        """Give every rank the first one's values, in place."""
        if self.size > 1:
            with self._blocked(x):
                dist.broadcast(x, group=self._group(), group_src=0)

    def _blocked(self, x: Tensor) -> AbstractContextManager[None]:
        """On a GPU the host only launches, from autograd's thread as well."""
        return self._waiting("the other ranks of the tensor axis") if x.device.type == "cpu" else nullcontext()
