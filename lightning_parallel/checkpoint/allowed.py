"""Checkpoints are data: what is read of a file is of types on a list, and nothing else is run or made.

The one idea: a pickle is a program, whose words are the names that it asks for. A folder's `.metadata` may ask for the
few types that torch.distributed.checkpoint writes there; everything else is read by `torch.load(weights_only=True)`,
which has such a list too. Who trusts a file says `weights_only=False`. Left out: how large a file claims that its
tensors are, which costs memory.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

_CLASSES: tuple[type, ...] = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
    OrderedDict,
)
_ALLOWED: dict[tuple[str, str], Any] = {(one.__module__, one.__qualname__): one for one in _CLASSES}
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_DAMAGED = (
    pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, KeyError, IndexError, ImportError,
    MemoryError,
)  # fmt: skip  # what unpickling ends in
_GLOBAL = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")  # PyTorch's words for what it does not read


class Untrusted(pickle.UnpicklingError):
    """A file asks for something that is not on the list."""

    @classmethod
    def asks_for(cls, path: Path, name: str) -> Untrusted:
        """That which a file asks for, in words."""
        return cls(
            f"{path} asks for {name}, which is no tensor and no plain value, and reading it could run anybody's code."
            " If you trust whoever wrote the file: fit(..., ckpt_path=..., weights_only=False), as in validate, test"
            " and predict; lightning-parallel consolidate --trusted for a folder. A type of your own is allowed by"
            " torch.serialization.add_safe_globals([...])."
        )


class Restricted(pickle.Unpickler):
    """Reads a pickle that asks for nothing but what a folder's `.metadata` is made of.

    Args:
        file: the pickle.
        path: its name, for errors.
    """

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """The object of that name.

        Raises:
            Untrusted: it is not on the list.
        """
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return lambda *parts: os.path.join("", *parts)  # another system's paths cannot be made here
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda name: torch.serialization._get_layout(name)
        if module == "torch" and isinstance(vars(torch).get(name), (torch.dtype, torch.layout)):
            return vars(torch)[name]
        raise Untrusted.asks_for(self._path, f"{module}.{name}")


def read_metadata(path: Path) -> Metadata:
    """What a folder of torch.distributed.checkpoint says of itself.

    Args:
        path: the file `.metadata`.

    Raises:
        ValueError: it is damaged, or names files outside of its folder.
        Untrusted: it asks for what is not on the list.
    """
    try:
        with _left_alone(path):
            found = Restricted(io.BytesIO(path.read_bytes()), path).load()
        return _checked(found, path)
    except Untrusted:
        raise
    except _DAMAGED as error:
        raise ValueError(_damaged(path, error)) from error


def _checked(found: Any, path: Path) -> Metadata:
    if type(found) is not Metadata or type(found.state_dict_metadata) is not dict:
        raise ValueError(f"it holds a {type(found).__name__}")
    for info in (found.storage_data or {}).values():
        name = info.relative_path
        if type(name) is not str or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"it names the file {name!r}, outside of its folder")
    return found


@contextmanager
def _left_alone(path: Path) -> Iterator[None]:
    """A pickle may set attributes of what it is given, be it a class: those have what they had."""
    shared = [*_CLASSES, *metadata._MEM_FORMAT_ENCODING]
    before = [dict(vars(one)) for one in shared]
    try:
        yield
    finally:
        changed = [one for one, then in zip(shared, before, strict=True) if _restore(one, then)]
        if changed:
            raise ValueError(f"it sets attributes of {changed[0]!r}")


def _restore(one: Any, then: dict[str, Any]) -> bool:
    """Whether an object's attributes had to be put back."""
    now = dict(vars(one))
    wrong = {name for name in now.keys() | then.keys() if now.get(name) is not then.get(name)}
    for name in wrong:
        setattr(one, name, then[name]) if name in then else delattr(one, name)
    return bool(wrong)


class FolderReader(dcp.FileSystemReader):
    """torch.distributed.checkpoint's reader, with `.metadata` read once and by the list.

    Args:
        folder: what torch.distributed.checkpoint wrote.
        weights_only: False trusts the folder.
    """

    def __init__(self, folder: Path, weights_only: bool | None) -> None:
        super().__init__(folder)
        self._folder, self._trusted = folder, weights_only is False
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `allowed.read_metadata`."""
        if self._metadata is None:
            path = self._folder / ".metadata"
            self._metadata = super().read_metadata() if self._trusted else read_metadata(path)
        return self._metadata


class FolderPlanner(DefaultLoadPlanner):
    """torch.distributed.checkpoint's planner, with values that are no tensors read as `torch.load` reads a file.

    Args:
        folder: what is read, for errors.
        weights_only: see `torch.load`.
    """

    def __init__(self, folder: Path, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder, self._weights_only = folder, weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value in its place.

        Raises:
            Untrusted: it asks for what is not on the list.
        """
        assert read_item.type == LoadItemType.BYTE_IO
        name = read_item.dest_index.fqn
        with named(self._folder / name, lambda: value.getvalue()):
            self.state_dict[name] = torch.load(value, weights_only=self._weights_only)


@contextmanager
def named(path: Path, content: Callable[[], bytes]) -> Iterator[None]:
    """PyTorch's refusal in our words: which file, which type, and what to do.

    Args:
        path: what is read.
        content: reads all of it; called if PyTorch does not name the type.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        name = _asked_for(str(error)) or _first_asked(path, content())
        if name is None:
            raise
        raise Untrusted.asks_for(path, name) from error


def _asked_for(words: str) -> str | None:
    """What PyTorch says that a file asks for."""
    found = _GLOBAL.search(words)
    return found and found[1]


def _first_asked(path: Path, content: bytes) -> str | None:
    """The first name of no module of PyTorch's that a file asks for."""
    try:
        if zipfile.is_zipfile(io.BytesIO(content)):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
        file = io.BytesIO(content)
        while True:  # older files are several pickles, to the end of which there is an exception
            _Asking(file).load()
    except _Asked as asked:
        return str(asked)
    except Exception:
        return None


class _Asked(Exception):
    """A name that a pickle asks for."""


class _Asking(pickle.Unpickler):
    """Goes through a pickle up to such a name; PyTorch's own are stood in for."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("torch", "collections"):
            return _PickleStandIn
        raise _Asked(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return _PickleStandIn()


class _PickleStandIn(dict):
    """Takes whatever a pickle gives it."""

    def __new__(cls, *_: Any) -> _PickleStandIn:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        """Nothing is kept."""

    def __setstate__(self, state: Any) -> None:
        """Nothing is kept."""


def _damaged(path: Path, error: BaseException) -> str:
    return (
        f"{path} cannot be read ({type(error).__name__}: {error}). It is damaged, or no file that"
        " torch.distributed.checkpoint wrote; use an older checkpoint."
    )
