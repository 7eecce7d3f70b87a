"""How a parameter lies over the ranks of an axis: which part of the whole each holds.

The one idea: a parameter is cut along one dim. Where several matrices are kept as one (query, key and value), each of
these segments is cut by itself, so that a rank has the same heads of all. Parts are those of DTensor's `Shard`:
`ceil(n / ranks)` each, the last ones shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.distributed.tensor import Shard


@dataclass(frozen=True)
class ShardMap:
    """A parameter's parts.

    Args:
        shape: of the whole.
        dim: along which it is cut.
        segments: lengths along `dim` that are cut one by one; they sum to the whole.
        size: number of ranks.

    Example:
        >>> ShardMap((6, 2), 0, (4, 2), 2).cut(torch.arange(12).view(6, 2), 1)[:, 0].tolist()
        [4, 6, 10]
    """

    shape: tuple[int, ...]
    dim: int
    segments: tuple[int, ...]
    size: int

    def span(self, rank: int, segment: int = 0) -> tuple[int, int]:
        """Begin and end of a rank's part within a segment."""
        length = self.segments[segment]
        step = ceil(length / self.size)
        return min(rank * step, length), min((rank + 1) * step, length)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's part."""
        spans = (self.span(rank, i) for i in range(len(self.segments)))
        return (*self.shape[: self.dim], sum(end - begin for begin, end in spans), *self.shape[self.dim + 1 :])

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of the whole, in memory of its own."""
        parts = [
            segment.narrow(self.dim, begin, end - begin)
            for i, segment in enumerate(whole.split(list(self.segments), self.dim))
            for begin, end in [self.span(rank, i)]
        ]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, from every rank's part."""
        by_rank = [
            part.split(
                [end - begin for begin, end in (self.span(rank, i) for i in range(len(self.segments)))], self.dim
            )
            for rank, part in enumerate(parts)
        ]
        return torch.cat([cut for segment in zip(*by_rank, strict=True) for cut in segment], self.dim)

    def placement(self) -> Shard | None:
        """DTensor's word for it; None where several segments are cut, for which it has none."""
        return Shard(self.dim) if len(self.segments) == 1 else None
