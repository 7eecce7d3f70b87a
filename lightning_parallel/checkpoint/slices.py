"""`TensorSlice`: this rank's part of a tensor in a checkpoint's folder, whose other parts other ranks have.

The one idea: torch.distributed.checkpoint stores a tensor in chunks, each with its place in the whole, and fills a
place from whatever chunks there are. So ranks that write their parts write a whole, and any other number of ranks
reads parts of its own from it. A DTensor does the same where a tensor is cut in one piece; here a rank may have
several (its heads of query, key and value).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_parallel.parallel.shares import ShardMap


class TensorSlice(Tensor):
    """A part of a tensor, that claims the shape of the whole.

    Args:
        shares: how the whole is cut.
        rank: whose part it is.
        local: the part, on the host.

    Raises:
        TypeError: it is used for anything but to be written or read.
    """

    @staticmethod
    def __new__(cls: type[TensorSlice], shares: ShardMap, rank: int, local: Tensor) -> TensorSlice:
        return Tensor._make_wrapper_subclass(cls, torch.Size(shares.shape), dtype=local.dtype)

    def __init__(self, shares: ShardMap, rank: int, local: Tensor) -> None:
        """See the class."""
        self.shares, self.rank, self.local = shares, rank, local

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Slice({self.shares}, rank={self.rank})"

    def __create_write_items__(self, name: str, value: Any) -> list[WriteItem]:
        """What the writer is to write, in its own words."""
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shares.shape)),
            )
            for chunk, _ in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What the reader is to read."""
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The values of one chunk, to be read from or written to."""
        return next(view for chunk, view in self._chunks() if chunk.offsets == index.offset)

    def _chunks(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """For each segment its place in the whole and this rank's values of it."""
        dim, segments, begin = self.shares.dim, self.shares.segments, 0
        for i, first in enumerate(accumulate(segments[:-1], initial=0)):
            span = self.shares.span(self.rank, i)
            view = self.local.narrow(dim, begin, span[1] - span[0])
            offsets = [0] * view.dim()
            offsets[dim] = first + span[0]
            begin += view.shape[dim]
            if view.numel():
                yield ChunkStorageMetadata(torch.Size(offsets), view.shape), view

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"A Slice is written or read by torch.distributed.checkpoint, and has no {func}.")
