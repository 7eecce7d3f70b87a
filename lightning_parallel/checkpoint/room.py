"""Words for a disk that is full: which file, how much is free, how much is needed, and what became of the old file.

The one idea: PyTorch's writers end in words of their own where the system refuses to write; the system's are behind
them, and are found there. Left out: asking beforehand, since a quota does not tell, and others write too.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def room_for(path: Path, value: Any = None) -> Iterator[None]:
    """A context that writes a checkpoint.

    Args:
        path: where it goes, for the error.
        value: what is written, if it is known.

    Raises:
        OSError: the disk is full, there is a quota, or files may not be as large; with path, sizes and remedy.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = _of_the_system(error)
        if found is None:
            raise
        raise OSError(found.errno, _words(path, found, value)) from error


@contextmanager
def unwrapped_errors() -> Iterator[None]:
    """What failed, out of what torch.distributed.checkpoint puts around it on all ranks (which is no `Exception`)."""
    try:
        yield
    except CheckpointException as error:
        [(first, _), *_] = error.failures.values()
        raise first from None


class FolderWriter(dcp.FileSystemWriter):
    """torch.distributed.checkpoint's writer, which says so on all ranks if one rank's disk is full.

    Args:
        part: where it writes.
        folder: what the folder is called when it is whole, for errors.
        value: what this rank writes.
    """

    def __init__(self, part: Path, folder: Path, value: Any) -> None:
        super().__init__(part)
        self._folder, self._value = folder, value

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write this rank's part."""
        with room_for(self._folder, self._value):
            return super().write_data(*args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        """Write what the folder says of itself."""
        with room_for(self._folder):
            super().finish(*args, **kwargs)


def _of_the_system(error: BaseException | None) -> OSError | None:
    """The error of the system's behind another, if it is one of a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def _words(path: Path, error: OSError, value: Any) -> str:
    free = shutil.disk_usage(path.parent).free
    needed = "" if value is None else f"; its tensors have {_size(_bytes_of(value))}"
    return (
        f"The checkpoint {path} could not be written: {os.strerror(error.errno or 0)}. {path.parent} has {_size(free)}"
        f" free{needed}. What was at {path} is as it was. Make room, choose another dirpath= or default_root_dir=, or"
        " keep fewer files with ModelCheckpoint(save_top_k=1, save_weights_only=True)."
    )


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


def _size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} TiB"
