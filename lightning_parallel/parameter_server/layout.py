"""A model as one flat vector, cut into ranges: the keys of the table.

The one idea: parameters lie one behind the other in a vector of float32 numbers, and a range of that vector is the unit
that is stored, replicated, moved, pushed and pulled. Left out: where a range lies
(``parameter_server/manager/ring.py``) and what is done to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """``num_ranges`` ranges of nearly equal length that together are the numbers 0 to ``size - 1``.

    Args:
        size: elements of the flat vector, >= 1.
        num_ranges: ranges, 1 to ``size``.

    Raises:
        ValueError: there are fewer elements than ranges, or no range.

    Example:
        >>> layout = Layout(size=10, num_ranges=3)
        >>> layout.bounds
        ((0, 4), (4, 7), (7, 10))
        >>> [part.tolist() for part in layout.split(torch.arange(10))]
        [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    """

    size: int
    num_ranges: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranges <= self.size:
            raise ValueError(
                f"Layout got num_ranges={self.num_ranges} for {self.size} elements. Use 1 to {self.size} ranges."
            )

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First and one-past-last element of each range."""
        short, longer = divmod(self.size, self.num_ranges)
        starts = [index * short + min(index, longer) for index in range(self.num_ranges + 1)]
        return tuple(itertools.pairwise(starts))

    def length(self, key: int) -> int:
        """Elements of a range."""
        start, end = self.bounds[key]
        return end - start

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views of the vector's ranges, in order.

        Raises:
            ValueError: the vector has another length.
        """
        if vector.numel() != self.size:
            raise ValueError(f"The table has {self.size} elements, got {vector.numel()}. Flatten all parameters.")
        if self.num_ranges == 1:
            return [vector]
        return [vector[start:end] for start, end in self.bounds]

    def join(self, parts: Mapping[int, Tensor]) -> Tensor:
        """The vector of all ranges, key -> values."""
        if self.num_ranges == 1:
            return parts[0]
        return torch.cat([parts[key] for key in range(self.num_ranges)])


def flatten(tensors: Iterable[Tensor | None], like: Iterable[Tensor]) -> Tensor:
    """One float32 vector of tensors, zeros where one is None.

    Args:
        tensors: such as the gradients of a model's parameters.
        like: tensors of the shapes that the absent ones have, such as the parameters.

    Example:
        >>> flatten([torch.ones(2), None], [torch.ones(2), torch.ones(1, 2)])
        tensor([1., 1., 0., 0.])
    """
    pairs = zip(tensors, like, strict=True)
    parts = [(torch.zeros_like(model) if tensor is None else tensor).detach().reshape(-1) for tensor, model in pairs]
    return torch.cat(parts).to(torch.float32)


@torch.no_grad()
def unflatten(vector: Tensor, into: Iterable[Tensor]) -> None:
    """Copy a flat vector into tensors, in order.

    Raises:
        ValueError: the tensors have another number of elements than the vector.

    Example:
        >>> weight = torch.zeros(2, 2)
        >>> unflatten(torch.arange(4.0), [weight])
        >>> weight.tolist()
        [[0.0, 1.0], [2.0, 3.0]]
    """
    tensors = list(into)
    total = sum(tensor.numel() for tensor in tensors)
    if total != vector.numel():
        raise ValueError(f"Got {vector.numel()} values for tensors of {total} elements. Use those that were flattened.")
    for tensor, part in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
