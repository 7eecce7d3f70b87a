"""What a node of autograd's graph saved in its forward, read once more beside the node's own reading.

The one idea: a tensor that passed no hooks can be read at any time. One that did is unpacked by a function of somebody
else's, within the backward: activation checkpointing computes it anew, once a backward, and allows one reading of each.
Its record of what was read is told to expect two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter


class CannotRead(Exception):
    """A node's saved tensor can only be read by the node."""


_TELLS_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # an older PyTorch, 2.9 among them, does not
_EDGES = {"self": 0, "input": 0, "mat1": 1, "mat2": -1}  # of what is saved under a name
Factor: TypeAlias = Tensor | Callable[[], Tensor]  # a tensor, or how to read it from within the backward


def hook_on_saved_tensors() -> Callable[[Tensor], Any] | None:
    """What is called with every tensor that autograd saves, if somebody wants to know."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def reader(name: str) -> Callable[[Any], Factor]:
    """What reads the saved tensor `name` of a node.

    It raises `CannotRead` where the node alone may read it. Otherwise it gives the tensor, or how to read it within the
    backward that the node is part of.
    """
    raw_name, saved_name = f"_raw_saved_{name}", f"_saved_{name}"

    def read(node: Any) -> Factor:
        try:
            raw = getattr(node, raw_name)
        except (AttributeError, RuntimeError) as error:  # there is none, or none any more
            raise CannotRead from error
        if not _TELLS_HOOKS:
            leaf = _parameter_at(node, name)
            return read_by_packing(raw) if leaf is None else lambda: leaf.data  # as below
        try:
            unpack = raw.unpack_hook
        except RuntimeError as error:  # a function that is not Python's
            raise CannotRead from error
        if unpack is None:
            saved = getattr(node, saved_name)
            if isinstance(saved, Parameter):  # whose memory may come and go until the node's turn
                return lambda: saved.data
            return saved.data  # as it is saved it knows all the graph before it; no operator runs
        if getattr(unpack, "__module__", "") == "torch.utils.checkpoint":
            _expect_two_readings(raw.data)
        return lambda: getattr(node, saved_name).detach()

    return read


def _parameter_at(node: Any, name: str) -> Parameter | None:
    """The parameter that a node saved as it is, if its edge tells that."""
    behind = node.next_functions[_EDGES[name]][0] if name in _EDGES else None
    leaf = getattr(behind, "variable", None)
    return leaf if isinstance(leaf, Parameter) else None


def read_by_packing(raw: Any) -> Tensor:
    """A saved tensor that passed no hooks, where PyTorch does not tell: it then takes a pair, which sees the tensor.

    As with all hooks, autograd no longer raises if somebody wrote to the tensor since the forward.

    Raises:
        CannotRead: it passed some.
    """
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach())
        return tensor

    try:
        raw.register_hooks(pack, lambda tensor: tensor)
    except RuntimeError as error:
        raise CannotRead from error
    return seen[0]


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
