"""`Presence`: which parameters any rank made a gradient for since the last step, where an optimizer would not ask.

The one idea: in one process an optimizer passes over a parameter without a gradient. One whose gradients are zeros
cannot: momentum and weight decay move the parameter all the same. So it is found out before it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.zero.reducer import Waiting


class Presence:
    """Notes which parameters get gradients.

    Args:
        parameters: that train.
        group: a group for host tensors of all ranks.
        waiting: a context entered while this process is blocked.

    Attributes:
        seen: those for which this rank made one.
        anywhere: those for which any rank did, since that was agreed.

    Example:
        >>> used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        >>> presence = Presence([used, unused])
        >>> used.sum().backward()
        >>> presence.agree(); presence.anywhere == {used}
        True
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: Any = None,
        waiting: Waiting = lambda what: nullcontext(),
    ) -> None:
        self.parameters, self.group, self.waiting = list(parameters), group, waiting
        self.seen: set[Tensor] = set()
        self.anywhere: set[nn.Parameter] = set()
        self._handles = [p.register_post_accumulate_grad_hook(self.seen.add) for p in self.parameters]

    def agree(self) -> None:
        """Find out what other ranks have made; all ranks call it."""
        there = torch.tensor([p in self.seen for p in self.parameters], dtype=torch.uint8)
        if dist.is_initialized():
            with self.waiting("the other ranks' gradients"):
                dist.all_reduce(there, op=dist.ReduceOp.MAX, group=self.group)
        self.anywhere = {p for p, made in zip(self.parameters, there.tolist(), strict=True) if made}

    def forget(self) -> None:
        """Gradients are gone."""
        self.seen.clear()
        self.anywhere = set()

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
