"""`StoredTensor`: a tensor that lies in a checkpoint's folder, of which only what is used is read.

The one idea: ranks that divide a tensor take `whole.flatten()[begin:end]` of it. Of a stored tensor that is a read of
these bytes, of any other use a read of all. So who loads need not know where a tensor is. Left out: small tensors,
which are read at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_META_TELLS = torch.__version__ >= "2.11"  # loads onto meta read no values and say where they begin; fakes do, slower
_SMALL = 1 << 12  # bytes; of a smaller tensor's file what tells its layout is more than its values


@dataclass(frozen=True)
class FilePlace:
    """Where the file of one tensor lies: `length` bytes of the file at `path`, from `offset` on."""

    path: Path
    offset: int
    length: int

    def layout(self, file: RawIOBase) -> tuple[Tensor, int | None]:
        """The tensor on the meta device, and where its values begin; None where PyTorch does not say."""
        with nullcontext() if _META_TELLS else FakeTensorMode():
            tensor = torch.load(self._view(file), map_location="meta" if _META_TELLS else None, weights_only=True)
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if not _META_TELLS:
            tensor = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        return tensor, begin if tensor.is_contiguous() and not tensor.storage_offset() else None

    def _view(self, file: RawIOBase) -> Any:
        return _create_file_view(file, self.offset, self.length)

    def read(self, begin: int, end: int) -> Tensor:
        """Elements from `begin` to `end` of the flattened tensor.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            return self._read(begin, end)
        except (RuntimeError, EOFError) as error:
            raise ValueError(f"{self.path} is damaged, or no file of a sharded checkpoint: {error}") from error

    def _read(self, begin: int, end: int) -> Tensor:
        with self.path.open("rb", buffering=0) as file:  # a buffer would read kilobytes wherever a header is looked at
            tensor, first = self.layout(file)
            if first is None:
                return torch.load(self._view(file), map_location="cpu", weights_only=True).flatten()[begin:end]
            file.seek(self.offset + first + begin * tensor.element_size())
            values = bytearray((end - begin) * tensor.element_size())
            _fill(file, memoryview(values))
        return torch.frombuffer(values, dtype=tensor.dtype) if values else torch.empty(0, dtype=tensor.dtype)


@dataclass(frozen=True)
class FilePlaces:
    """Where the chunks of a tensor lie that was written in slices along one dim.

    Args:
        shape: of the whole.
        dim: along which it was cut.
        lengths: of the chunks along `dim`, in order.
        places: of the chunks.
    """

    shape: tuple[int, ...]
    dim: int
    lengths: tuple[int, ...]
    places: tuple[FilePlace, ...]

    def read(self, begin: int, end: int) -> Tensor:
        """Elements from `begin` to `end` of the flattened tensor.

        The dims before `dim` make rows. Of a range within one row the chunks' parts are read, of several rows the rows.

        Raises:
            ValueError: a file is damaged.
        """
        inner = prod(self.shape[self.dim + 1 :])
        row = self.shape[self.dim] * inner
        first, last = begin // row, -(-end // row)
        if last - first > 1:
            widths = [length * inner for length in self.lengths]
            parts = [
                p.read(first * w, last * w).view(last - first, w) for p, w in zip(self.places, widths, strict=True)
            ]
            return torch.cat(parts, 1).flatten()[begin - first * row : end - first * row]
        parts, offset = [], first * row
        for place, width in zip(self.places, (length * inner for length in self.lengths), strict=True):
            low, high = (min(max(x - offset, 0), width) for x in (begin, end))
            parts += [place.read(first * width + low, first * width + high)] if low < high else []
            offset += width
        return torch.cat(parts) if parts else self.places[0].read(0, 0)


def _fill(file: RawIOBase, values: memoryview) -> None:
    """Read as many bytes as there is room for; the system may give them in several portions."""
    while values:
        count = file.readinto(values)
        if not count:
            raise EOFError(f"it ends {len(values)} bytes too early.")
        values = values[count:]


class StoredTensor(Tensor):
    """A tensor whose values are read when they are used.

    Args:
        place: where it is stored.
        shape: of the whole, or of the flattened whole.
        dtype: of its elements.
    """

    @staticmethod
    def __new__(
        cls: type[StoredTensor], place: FilePlace | FilePlaces, shape: torch.Size, dtype: torch.dtype
    ) -> StoredTensor:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def __init__(self, place: FilePlace | FilePlaces, shape: torch.Size, dtype: torch.dtype) -> None:
        """See the class."""
        self.place = place

    def read(self) -> Tensor:
        """All of it."""
        return self.place.read(0, self.numel()).view(self.shape)

    @property
    def is_small(self) -> bool:
        """Whether to read it at once."""
        return self.numel() * self.element_size() < _SMALL

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor({self.place}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.read()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if func is aten.detach.default:
            return StoredTensor(first.place, first.shape, first.dtype)
        if func is aten.view.default and list(args[1]) in ([-1], [first.numel()]):
            return StoredTensor(first.place, torch.Size([first.numel()]), first.dtype)
        if func is aten.slice.Tensor and first.dim() == 1 and len(args) == 4 and args[1] == 0:
            size = first.numel()
            begin, end = (min(max(place + size if place < 0 else place, 0), size) for place in args[2:])
            return first.place.read(begin, max(begin, end))
        read = lambda value: value.read() if isinstance(value, StoredTensor) else value  # noqa: E731
        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


def stored_tensors(folder: Path, metadata: Metadata) -> Mapping[str, StoredTensor]:
    """The tensors of a folder that may be read in parts, by name: those in one piece, or in slices along one dim.

    Args:
        folder: what torch.distributed.checkpoint wrote.
        metadata: what its reader says of it.
    """
    found = {}
    for name, kind in metadata.state_dict_metadata.items():
        if isinstance(kind, TensorStorageMetadata) and (place := _places(folder, metadata, name, kind)) is not None:
            found[name] = StoredTensor(place, kind.size, kind.properties.dtype)
    return found


def _places(folder: Path, metadata: Metadata, name: str, kind: TensorStorageMetadata) -> FilePlace | FilePlaces | None:
    chunks = sorted(kind.chunks, key=lambda chunk: tuple(chunk.offsets))
    infos = [cast(Any, metadata.storage_data).get(MetadataIndex(name, chunk.offsets)) for chunk in chunks]
    if any(info is None or info.transform_descriptors for info in infos):
        return None
    places = tuple(FilePlace(folder / info.relative_path, info.offset, info.length) for info in infos)
    cut = [dim for dim, length in enumerate(kind.size) if any(chunk.sizes[dim] != length for chunk in chunks)]
    if not cut:
        return places[0] if len(places) == 1 else None
    [dim, *more] = cut
    return None if more else FilePlaces(tuple(kind.size), dim, tuple(chunk.sizes[dim] for chunk in chunks), places)
