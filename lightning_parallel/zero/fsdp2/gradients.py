"""`ShardGradients`: FSDP2 reduces the same gradients on all ranks, whichever of them a rank has made.

The one idea: FSDP2 reduces what a block has gradients for, and ranks on different branches would reduce vectors of
different lengths, which ends a gloo process without words. So a block's backward ends with zeros for what it did not
make. What no rank has made is None afterwards, as in one process. Left out: blocks that a rank does not call
(``zero/same_calls.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_parallel.zero.fsdp2.shards import groups_of
from lightning_parallel.zero.reducer import Waiting
from lightning_parallel.zero.same_calls import SameCalls


class ShardGradients:
    """Watches FSDP2's groups of parameters in backwards.

    Args:
        parts: sharded modules, each with its groups.
        names: of these.
        control: a group for host tensors of all ranks.
        every: see `SameCalls`.
        waiting: a context entered while this process is blocked.
    """

    def __init__(
        self, parts: Sequence[FSDPModule], names: Sequence[str], control: Any, every: bool, waiting: Waiting
    ) -> None:
        self.control, self.waiting = control, waiting
        self._calls = SameCalls(names, control, "fsdp2", every, waiting)
        self._running = False
        self.alone = False  # whether this rank evaluates what others have no rows for
        self._filled: set[nn.Parameter] = set()
        self._parameters: list[nn.Parameter] = []
        for number, part in enumerate(parts):
            for group in groups_of(part):
                self._parameters += [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
                group.pre_forward = self._called(number, "forward", group.pre_forward)
                group.pre_backward = self._called(number, "backward", group.pre_backward)
                group.post_backward = self._filling(group, group.post_backward)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward."""
        before = {p for p in self._parameters if p.grad is not None}
        self._filled, self._running = set(), True
        try:
            yield
        finally:
            self._running = False
        self._calls.end()
        for parameter in self._nobodys() - before:
            parameter.grad = None

    def _nobodys(self) -> set[nn.Parameter]:
        """Those for which every rank has put zeros. Collective."""
        filled = torch.tensor([p in self._filled for p in self._parameters], dtype=torch.uint8)
        with self.waiting("the other ranks' gradients"):
            dist.all_reduce(filled, op=dist.ReduceOp.MIN, group=self.control)
        return {p for p, everywhere in zip(self._parameters, filled.tolist(), strict=True) if everywhere}

    def _called(self, number: int, way: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def compared(*args: Any, **kwargs: Any) -> Any:
            if not self.alone:
                self._calls.call(number, way)
            return run(*args, **kwargs)

        return compared

    def _filling(self, group: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        def filled(*args: Any, **kwargs: Any) -> Any:
            if self._running and group._training_state.name == "PRE_BACKWARD":
                for parameter in group.fsdp_params:
                    self._fill(parameter)
            return run(*args, **kwargs)

        return filled

    def _fill(self, parameter: Any) -> None:
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is None or not whole.requires_grad:
            return
        if whole.grad is None and parameter.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole)
            self._filled.add(parameter.sharded_param)
        else:
            self._filled.discard(parameter.sharded_param)
