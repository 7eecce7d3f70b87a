"""What is known of a tensor that another stage holds: its shape, what it stands for and how it was computed.

The one idea: a record, on which all the rest of this folder works. What happens when one is used is said in
``phantom.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Leaf = tuple[str, int]  # a unit and the number of a tensor in what it returns


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class Recipe:
    """How a Phantom was computed.

    Args:
        func, args, kwargs: the call; lists and dicts among the arguments are copies.
        tensors: the tensors among them, and how often each had been written to.
        grad: whether the call was with gradients.
        draws: how many random operators had run before.
        index: which of the results the Phantom is, None if it is the only one.
    """

    func: Callable
    args: Any
    kwargs: Any
    tensors: list[tuple[Tensor, int]]
    grad: bool
    draws: int
    index: int | None = None

    def holds(self) -> bool:
        """Whether the arguments are still what they were."""
        return all(version_of(tensor) == version for tensor, version in self.tensors)


class StandIn(Tensor):
    """A tensor with shape, stride, dtype and device, without data.

    Attributes:
        stands_for: what kind of thing it is the stand-in of.
        meta: the same tensor on the meta device.
        origin: what it stands for, in words, for error messages.
        value: the tensor it is bound to, or None.
        version: how often that tensor had been written to when it was bound.
        leaf: for what a unit returned, (unit, number of the tensor in what it returned).
        recipe: for what was computed from others, how; None if it cannot be computed again.
        leaves: those that were not computed and that it comes from; empty if it is one.
        spoilt: whether it, or what shares its memory, was written to without a value.
    """

    stands_for: ClassVar[Literal["value", "parameter", "gradient"]] = "value"
    meta: Tensor
    origin: str
    value: Tensor | None
    version: int
    leaf: Leaf | None
    recipe: Recipe | None
    leaves: tuple[StandIn, ...]
    spoilt: bool

    def __new__(cls, meta: Tensor, device: torch.device, origin: str, requires_grad: bool = False) -> Any:
        stand_in = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        stand_in.meta, stand_in.origin, stand_in.value = meta, origin, None
        stand_in.leaf, stand_in.recipe, stand_in.leaves, stand_in.spoilt = None, None, (), False
        return stand_in

    def bind(self, value: Tensor) -> None:
        """Let it stand for a tensor that is there."""
        self.value, self.version = value, version_of(value)
