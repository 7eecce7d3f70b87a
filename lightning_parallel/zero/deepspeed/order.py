"""`Handover`: gradients are given to DeepSpeed in one order on all ranks, and all ranks give the same ones.

The one idea: DeepSpeed puts gradients into buckets as they come, and reduces a bucket when it is full. Ranks that take
different branches would fill different buckets, which ends a gloo process without words. So a gradient is handed over
when those before it are, in an order that all know; when a backward ends the rest follows, with zeros for what this
rank did not make. Left out: which parameters nobody uses (``presence.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.zero.reducer import Waiting


class Handover:
    """The order.

    Args:
        parameters: that train, in the order in which a backward makes their gradients, as far as is known; from the
            second backward on it is that of rank 0's first.
        hand: gives DeepSpeed the gradient of a parameter.
        group: for host tensors, of all ranks.
        waiting: a context entered while this process is blocked.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        hand: Callable[[nn.Parameter], None],
        group: Any = None,
        waiting: Waiting = lambda what: nullcontext(),
    ) -> None:
        self.order, self.hand, self.group, self.waiting = list(parameters), hand, group, waiting
        self._agreed = False
        self._made: dict[nn.Parameter, None] = {}
        self._next = 0

    def made(self, parameter: nn.Parameter) -> None:
        """A backward has made a gradient here."""
        if parameter in self._made:  # DeepSpeed says why it cannot take it twice
            self.hand(parameter)
            return
        self._made[parameter] = None
        while self._next < len(self.order) and self.order[self._next] in self._made:
            self.hand(self.order[self._next])
            self._next += 1

    def finish(self) -> None:
        """The backward has ended: hand the rest over. Collective."""
        for parameter in self.order[self._next :]:
            if parameter not in self._made:
                parameter.grad = torch.zeros_like(parameter)
            self.hand(parameter)
        if not self._agreed:
            with self.waiting("the other ranks' gradients"):
                self._agree()
        self._made, self._next = {}, 0

    def _agree(self) -> None:
        """From now on the order is that in which rank 0's first backward made gradients."""
        self._agreed = True
        places = {parameter: place for place, parameter in enumerate(self.order)}
        rest = [parameter for parameter in self.order if parameter not in self._made]
        order = torch.tensor([places[p] for p in (*self._made, *rest)])
        source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.broadcast(order, source, group=self.group)
        self.order = [self.order[place] for place in order.tolist()]
