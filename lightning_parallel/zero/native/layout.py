"""Which elements of which bucket belong to which rank: arithmetic on sizes, the same on every rank.

The one idea: neighbouring parameters lie in one flat vector, a bucket, and rank r owns the r-th part of each bucket.
A part may begin and end inside a parameter, so that all parts are equal whatever the shapes are. Parameters begin at
multiples of 16 bytes, which kernels want; what that and the last rank's end add is padding.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class BucketLayout:
    """Places of parameters in a bucket that ranks share.

    Args:
        numels: elements of each parameter.
        offsets: where each begins in the bucket.
        part: elements of the bucket that each rank owns.
        ranks: N.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    part: int
    ranks: int

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return self.part * self.ranks

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """The elements of a flattened parameter that a rank owns, from and to; nothing is (0, 0).

        Example:
            >>> layout = lay_out([5, 4], ranks=2, itemsize=16)
            >>> [layout.piece(i, rank) for rank in (0, 1) for i in (0, 1)]
            [(0, 5), (0, 0), (0, 0), (0, 4)]
        """
        begin = min(max(rank * self.part - self.offsets[index], 0), self.numels[index])
        end = min(max((rank + 1) * self.part - self.offsets[index], 0), self.numels[index])
        return (begin, end) if end > begin else (0, 0)


def lay_out(numels: Sequence[int], ranks: int, itemsize: int) -> BucketLayout:
    """Put parameters one behind the other and cut the whole into equal parts.

    Args:
        numels: elements of each parameter.
        ranks: N.
        itemsize: bytes of an element.

    Example:
        >>> layout = lay_out([10, 3], ranks=2, itemsize=4)
        >>> layout.offsets, layout.part, layout.numel
        ((0, 12), 8, 16)
    """
    step = max(1, ALIGNMENT_BYTES // itemsize)
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += _up(numel, step)
    last = offsets[-1] + numels[-1] if offsets else 0
    return BucketLayout(tuple(numels), tuple(offsets), _up(-(-last // ranks), step), ranks)


def fill_buckets(keys: Sequence[Hashable], nbytes: Sequence[int], limit: int) -> list[list[int]]:
    """Neighbours of one key together, as many as fit; what is larger than a bucket has one of its own.

    Args:
        keys: what must not be mixed in a bucket, such as the dtype, of each parameter.
        nbytes: of each parameter.
        limit: bytes of a bucket.

    Returns:
        Indices of the parameters of each bucket.

    Example:
        >>> fill_buckets("aaaba", [4, 4, 4, 4, 4], limit=8)
        [[0, 1], [2], [3], [4]]
    """
    buckets: list[list[int]] = []
    for _, neighbours in groupby(range(len(keys)), key=lambda i: keys[i]):
        room = -1  # an empty parameter needs a bucket too
        for i in neighbours:
            if nbytes[i] > room:
                buckets.append([])
                room = limit
            buckets[-1].append(i)
            room -= nbytes[i]
    return [bucket for bucket in buckets if bucket]


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
