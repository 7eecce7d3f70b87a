"""Checkpoint files that are whole or not there, and words for those that are neither.

The one idea: a file is written beside its place under another name, brought to the disk, and renamed over the old one,
which a file system does at once. Whoever is killed meanwhile leaves the old file as it was.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_parallel.checkpoint.allowed import Untrusted, named
from lightning_parallel.checkpoint.room import room_for

_DAMAGED = (RuntimeError, EOFError, OSError, zipfile.BadZipFile, KeyError, UnicodeDecodeError, ValueError)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The name under which to write a file; it takes its place at `path` if the context ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)


def write(value: Any, path: Path) -> None:
    """`torch.save` to a file that is there whole or not at all.

    Raises:
        OSError: there is no room; with what is free, what is needed, and what to do.
    """
    with room_for(path, value), written_whole(path) as part:
        save_to_disk(value, part)


def save_to_disk(value: Any, path: Path) -> None:
    """`torch.save`, returning when the bytes are on the disk."""
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Bring a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """`torch.load` that reads tensors' bytes when they are used, and names the file in its errors.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is a folder, is damaged or was not written by `torch.save`.
        pickle.UnpicklingError: the file holds objects and `weights_only` (PyTorch's default) forbids them.
    """
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if path.is_dir():
        raise ValueError(
            f'{path} is a folder, as state_dict_type="sharded" writes it, and this strategy reads one file. Make one of'
            f" it: lightning-parallel consolidate {path} {path.with_name(path.stem + '-whole.ckpt')}"
        )
    try:
        with named(path, path.read_bytes):
            return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if isinstance(error, Untrusted) or zipfile.is_zipfile(path):
            raise  # PyTorch's own words about weights_only
        raise ValueError(_damaged(path, error)) from error
    except _DAMAGED as error:
        raise ValueError(_damaged(path, error)) from error


def read_checkpoint(path: Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """A file of `torch.save` with its weights and optimizer states mapped from the file, everything else in memory."""
    checkpoint = read(path, map_location, weights_only)
    if not isinstance(checkpoint, dict):
        return checkpoint
    mapped = ("state_dict", "optimizer_states")
    return {key: value if key in mapped else _map_tensors(torch.clone, value) for key, value in checkpoint.items()}


def refuse_foreign(checkpoint: Any, path: Path) -> None:
    """Raise for what is no Lightning checkpoint.

    Raises:
        ValueError: it has no state dict.
    """
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        kind = f"a mapping with {sorted(map(str, checkpoint))[:5]}" if isinstance(checkpoint, Mapping) else "no mapping"
        raise ValueError(
            f"{path} is no Lightning checkpoint: it holds {kind}, not 'state_dict'. Give ckpt_path a file that"
            " trainer.save_checkpoint wrote; weights alone are read by lightning_parallel.load_weights(module, path)."
        )


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) is dict:
        return {key: _map_tensors(function, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map_tensors(function, value) for value in tree)
    return tree


def _damaged(path: Path, error: Exception) -> str:
    first = str(error).strip().split("\n")[0]
    return (
        f"{path} cannot be read as a checkpoint ({type(error).__name__}: {first}). It is damaged, or no file that"
        " torch.save wrote; use an older checkpoint."
    )
