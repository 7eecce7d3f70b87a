"""What a node of autograd's graph saved in its forward, read once more beside the node's own reading.

The one idea: a tensor that passed no hooks can be read at any time. One that did is unpacked by a function of somebody
else's, within the backward: activation checkpointing computes it anew, once a backward, and allows one reading of each.
Its record of what was read is told to expect two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node


class CannotRead(Exception):
    """A node's saved tensor can only be read by the node."""


def read(node: Node, name: str) -> Tensor | Callable[[], Tensor]:
    """The saved tensor `name` of a node, or how to read it from within the backward that the node is part of.

    Raises:
        CannotRead: the node alone may.
    """
    raw: Any = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or not hasattr(raw, "unpack_hook"):  # a PyTorch that does not show it
        raise CannotRead
    unpack = raw.unpack_hook
    if unpack is None:
        return getattr(node, f"_saved_{name}").detach()  # as it is saved it knows all the graph before it
    if getattr(unpack, "__module__", "") == "torch.utils.checkpoint":
        _expect_two_readings(raw.data)
    return lambda: getattr(node, f"_saved_{name}").detach()


def _expect_two_readings(holder: Any) -> None:
    """Let what a checkpointed forward left in place of a tensor be unpacked by us and by the node."""
    handles = getattr(holder, "handles", None)
    if type(handles) is dict:
        holder.handles = _ReadTwice(handles)
    elif not isinstance(handles, _ReadTwice):
        raise CannotRead


class _ReadTwice(dict[int, Any]):
    """For each backward what a recomputation made; None, which marks it as used up, is heard the second time."""

    def __init__(self, handles: dict[int, Any]) -> None:
        super().__init__(handles)
        self._read: set[int] = set()

    def __setitem__(self, backward: int, handle: Any) -> None:
        if handle is None and backward not in self._read:
            self._read.add(backward)
        else:
            super().__setitem__(backward, handle)
