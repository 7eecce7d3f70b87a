"""Parameters in groups as one flat vector whose ranges are all alike, and one update for every group.

    group 0   a a a a a a .       R = 2 ranges      range 0   a a a a | b b
    group 1   b b b            ---------------->    range 1   a a a . | b .

The one idea: every group is cut into R equal pieces, and range r is the r-th piece of each, so that an update can tell
by the place in a range alone which group an element is of. Pieces are filled up with zeros. Left out: where parameters
and groups come from (``from_torch.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_parallel.parameter_server.layout import Layout
from lightning_parallel.parameter_server.updates import State, Update

Group = Sequence[Tensor]
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Table:
    """The shapes of all parameters, by group, and how many ranges hold them.

    Args:
        shapes: of every parameter of every group.
        num_ranges: ranges, at least 1.

    Example:
        >>> table = Table((((3,),), ((2,),)), num_ranges=2)
        >>> table.widths, table.layout.size
        ((2, 1), 6)
        >>> flat = table.pack([[torch.tensor([1.0, 2, 3])], [torch.tensor([8.0, 9])]])
        >>> flat.tolist()
        [1.0, 2.0, 8.0, 3.0, 0.0, 9.0]
        >>> [[part.tolist() for part in group] for group in table.unpack(flat)]
        [[[1.0, 2.0, 3.0]], [[8.0, 9.0]]]
    """

    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    num_ranges: int = 1

    @classmethod
    def of(cls, groups: Sequence[Group], num_ranges: int = 1) -> Table:
        """The table of such parameters; fewer ranges where there are fewer elements."""
        elements = sum(tensor.numel() for group in groups for tensor in group)
        shapes = tuple(tuple(tuple(tensor.shape) for tensor in group) for group in groups)
        return cls(shapes, max(1, min(num_ranges, elements)))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Elements that a range has of each group."""
        return tuple(-(-sum(map(_count, group)) // self.num_ranges) for group in self.shapes)

    @cached_property
    def layout(self) -> Layout:
        """The flat vector and its ranges, all of one length."""
        return Layout(self.num_ranges * sum(self.widths), self.num_ranges)

    def pack(self, groups: Sequence[Sequence[Tensor | None]], device: torch.device = _HOST) -> Tensor:
        """One float32 vector, zeros where a tensor is None.

        Raises:
            ValueError: a tensor is sparse.
        """
        flat = [self._column(group, index, device) for index, group in enumerate(groups)]
        return flat[0].reshape(-1) if len(flat) == 1 else torch.cat(flat, dim=1).reshape(-1)

    def _column(self, group: Sequence[Tensor | None], index: int, device: torch.device = _HOST) -> Tensor:
        shapes = self.shapes[index]
        parts = [_flat(tensor, shape, device) for tensor, shape in zip(group, shapes, strict=True)]
        missing = self.num_ranges * self.widths[index] - sum(part.numel() for part in parts)
        padding = torch.zeros(missing, device=device)
        return torch.cat([*parts, padding]).view(self.num_ranges, self.widths[index])

    def unpack(self, vector: Tensor) -> list[list[Tensor]]:
        """The tensors of a packed vector."""
        columns = vector.view(self.num_ranges, -1).split(list(self.widths), dim=1)
        return [self._tensors(column.reshape(-1), shapes) for column, shapes in zip(columns, self.shapes, strict=True)]

    @staticmethod
    def _tensors(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        ends = list(itertools.accumulate(map(_count, shapes)))
        return [flat[end - _count(shape) : end].view(shape) for end, shape in zip(ends, shapes, strict=True)]

    @torch.no_grad()
    def copy_into(self, vector: Tensor, groups: Sequence[Group]) -> None:
        """Copy a packed vector into parameters."""
        for parameters, values in zip(groups, self.unpack(vector), strict=True):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _flat(tensor: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if tensor is None:
        return torch.zeros(_count(shape), device=device)
    refuse_sparse(tensor)
    return tensor.detach().to(device, torch.float32).reshape(-1)


def refuse_sparse(gradient: Tensor) -> None:
    """Raise for a gradient that has no dense memory.

    Raises:
        ValueError: it has none.
    """
    if gradient.layout != torch.strided:
        raise ValueError(
            f"A gradient of shape {tuple(gradient.shape)} is sparse ({gradient.layout}), and workers send whole"
            " vectors. Use sparse=False in nn.Embedding; filters=[TopK(...)] then sends few elements, and"
            ' update="worker" lets each worker run an optimizer that takes sparse gradients.'
        )


@dataclass(frozen=True)
class Grouped(Update):
    """An update for each group of a ``Table``.

    Args:
        parts: the groups' updates, each with its own learning rate.
        widths: elements that a range has of each group.
        leader: the group whose learning rate comes with a push; the others' change by the same factor.

    Example:
        >>> from lightning_parallel.parameter_server.updates import SGD
        >>> weights, update = torch.ones(3), Grouped((SGD(lr=0.5), SGD(lr=0.25)), (2, 1))
        >>> update.apply(weights, update.state(3), torch.ones(3), step=1, lr=1.0)
        >>> weights.tolist()
        [0.0, 0.0, 0.5]
    """

    parts: tuple[Update, ...] = ()
    widths: tuple[int, ...] = ()
    leader: int = 0

    def names(self) -> tuple[str, ...]:
        return tuple(f"{index}.{slot}" for index, part in enumerate(self.parts) for slot in part.names())

    def state(self, length: int) -> State:
        return {
            f"{index}.{slot}": vector
            for index, (part, width) in enumerate(zip(self.parts, self.widths, strict=True))
            for slot, vector in part.state(width).items()
        }

    def apply(self, weights: Tensor, state: State, push: Tensor, step: int, lr: float | None = None) -> None:
        pieces = zip(weights.split(list(self.widths)), push.split(list(self.widths)), strict=True)
        for index, (part, (own, pushed)) in enumerate(zip(self.parts, pieces, strict=True)):
            mine = {slot: state[f"{index}.{slot}"] for slot in part.names()}
            part.apply(own, mine, pushed, step, self.rate(index, lr))

    def rate(self, index: int, lr: float | None) -> float | None:
        """A group's learning rate, given the leader's."""
        if lr is None or index == self.leader:
            return lr
        own, leading = (getattr(self.parts[i], "lr", 0.0) for i in (index, self.leader))
        return own * (lr / leading) if leading else own
