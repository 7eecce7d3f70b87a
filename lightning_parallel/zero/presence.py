"""`Presence`: which parameters any rank made a gradient for since the last step, where an optimizer would not ask.

The one idea: in one process an optimizer passes over a parameter without a gradient. One that updates flat vectors
cannot: momentum and weight decay move the parameter all the same. So it is found out before it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Presence:
    """Notes which parameters get gradients.

    Args:
        parameters: that train.
        group: a group for host tensors of all ranks.

    Example:
        >>> used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        >>> presence = Presence([used, unused])
        >>> used.sum().backward()
        >>> presence.missing() == [unused]
        True
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: Any = None) -> None:
        self.parameters, self.group = list(parameters), group
        self._seen: set[Tensor] = set()
        self._handles = [p.register_post_accumulate_grad_hook(self._seen.add) for p in self.parameters]

    def missing(self) -> list[nn.Parameter]:
        """Parameters for which no rank has made a gradient; all ranks call it."""
        there = torch.tensor([p in self._seen for p in self.parameters], dtype=torch.uint8)
        if dist.is_initialized():
            dist.all_reduce(there, op=dist.ReduceOp.MAX, group=self.group)
        return [p for p, found in zip(self.parameters, there.tolist(), strict=True) if not found]

    def forget(self) -> None:
        """Gradients are gone."""
        self._seen.clear()

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
