"""Copies of a module that callbacks average, divided as the module's own parameters are.

The one idea: an average of parts is a part of the average. A copy's parameter is closed as the module's is, with a part
of its own that covers the same elements; `data` and `detach()` of both then give parts that go together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_parallel.zero.closed_parameters import Closed, KeptPart, close, reopen
from lightning_parallel.zero.native.partition import Partition
from lightning_parallel.zero.sharded_gradient import gather_gradient


def divide_copy(copied: nn.Module, names: Mapping[nn.Parameter, str], partition: Partition) -> None:
    """Leave of a copy's whole parameters what this rank keeps of the module's; of divided ones nothing changes.

    Args:
        copied: the copy, on whatever device.
        names: the module's parameters of this rank.
        partition: what divides them.
    """
    for parameter, name in names.items():
        like = copied.get_parameter(name) if partition.holds(parameter) else None
        if like is not None and not isinstance(like, Closed):
            begin, end = partition.piece(parameter)
            own = torch.cat([like.detach().reshape(-1)[begin:end], like.detach().new_full((1,), float("nan"))])
            like.data = own[-1:].as_strided(like.shape, [0] * like.dim(), end - begin)
            close(like, KeptPart(name, own[:-1], begin, end, partition.ranks.group))


def make_copy_whole(copied: nn.Module) -> None:
    """Give every parameter of a copy all of its elements again. Collective."""
    for parameter in copied.parameters():
        if isinstance(parameter, Closed):
            whole = gather_gradient(parameter._kept.values(parameter))
            reopen(parameter)
            parameter.data = whole
