"""Parameters that a forward reads beside their block's call, where no step did so before: all copies gather them then.

The one idea: a gather takes all copies, so they meet before it, on a group of their own, and say which parameter they
are about to read, and in which of their actions. Copies that read different ones are told so; one that reads nothing
waits for the next block's parts, which the first does not send, and the watch finds both. Left out: reads within
backwards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel.zero.gather.prefetch_order import Waiting


class LateReads:
    """Where the copies of a stage meet.

    Args:
        group: a host group of theirs over which nothing else is said; None is the default one.
        waiting: a context entered while this process is blocked.
    """

    def __init__(self, group: Any, waiting: Waiting) -> None:
        self._group, self._waiting = group, waiting

    def meet(self, name: str, place: int, action: int) -> None:
        """All copies are about to gather the same parameter.

        Args:
            name: its name.
            place: the number of what is gathered.
            action: how many actions this rank has begun.

        Raises:
            ValueError: another copy is about to gather another one, or elsewhere.
        """
        mine = torch.tensor([place, -place, action, -action])
        with self._waiting(
            f"the other copies of the model to read parameter `{name}` too, outside of its block's call"
        ):
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group)
        if (mine[0::2] != -mine[1::2]).any():
            raise ValueError(
                f"The step reads parameter `{name}` outside of its block's call, for the first time, and another copy"
                ' of the model reads another one, or elsewhere: zero_stage=3 with gather="microbatch" gathers what all'
                ' copies read alike. Decide by what all of them see (the step\'s number), or use gather="step".'
            )
