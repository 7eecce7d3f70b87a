"""A checkpoint that no rank has to hold whole: a folder into which every rank writes its part.

The one idea: torch.distributed.checkpoint stores tensors by name, and a name says what a tensor is (`state_dict/<key>`
or `optimizer/<number>/<parameter>/<field>`), so that any number of ranks finds its own. What is small and not a tensor
(epoch, schedulers, callbacks) is one file, `meta.pt`, written last. The folder is written beside its place and renamed.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_parallel.checkpoint.allowed import FolderPlanner, FolderReader
from lightning_parallel.checkpoint.files import read, save_to_disk, sync, write
from lightning_parallel.checkpoint.parts import stored_tensors
from lightning_parallel.checkpoint.room import FolderWriter, room_for, unwrapped_errors
from lightning_parallel.checkpoint.slices import TensorSlice

_META, _NAMES = "meta.pt", "state_dict_names"
Flat = dict[str, Any]


def save_sharded(
    checkpoint: Mapping[str, Any],
    names: list[str],
    folder: Path,
    barrier: Callable[[], None],
    own: Callable[[Flat], Flat] = lambda flat: flat,
) -> None:
    """Write a checkpoint of which every rank holds a part; all ranks call it.

    Args:
        checkpoint: what Lightning dumps, with this rank's part of `state_dict` and of each optimizer's `state`.
        names: all keys of the whole model's state dict, in order.
        folder: where it goes; what was there is replaced.
        barrier: waits for all ranks.
        own: of values by name those that this rank writes, where it has a part as a `TensorSlice`.

    Raises:
        OSError: one rank found no room; the folder that was there is as it was.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    part = folder.with_name(f".{folder.name}.part")
    if first:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    barrier()
    try:
        _write_parts(own(_flat(checkpoint)), part, folder)
        if first:
            with room_for(folder):
                _write_rest(checkpoint, names, part)
            _put_in_place(part, folder)
    finally:
        if first:
            shutil.rmtree(part, ignore_errors=True)  # there if something failed
    barrier()


def _write_parts(flat: Flat, part: Path, folder: Path) -> None:
    """Every rank's tensors; an error of one rank is raised on all."""
    with _alone_on_purpose(), unwrapped_errors():
        dcp.save(flat, storage_writer=FolderWriter(part, folder, flat), no_dist=not dist.is_initialized())


def _write_rest(checkpoint: Mapping[str, Any], names: list[str], part: Path) -> None:
    """What is no tensor of the model or its optimizers."""
    rest = {key: value for key, value in checkpoint.items() if key != "state_dict"} | {_NAMES: names}
    if "optimizer_states" in rest:
        rest["optimizer_states"] = [{**state, "state": {}} for state in rest["optimizer_states"]]
    save_to_disk(rest, part / _META)


def load_sharded(
    folder: Path,
    wanted: Callable[[str], bool] = lambda name: True,
    weights_only: bool | None = None,
    in_parts: bool = False,
    room: Callable[[str, TensorStorageMetadata], TensorSlice | None] = lambda name, kind: None,
) -> dict[str, Any]:
    """The checkpoint in a folder with those tensors whose name is wanted; of others `state_dict` has meta tensors.

    Args:
        folder: what `save_sharded` wrote.
        wanted: asked with `state_dict/<key>` and `optimizer/<number>/<parameter>/<field>`.
        weights_only: see `torch.load`; False trusts the folder, which then may run code.
        room: gives a `TensorSlice` where a part is wanted of the tensor of that name; the part is what is returned.
        in_parts: leave large tensors where they are; of each only what is used is read, when it is used.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no whole checkpoint.
        pickle.UnpicklingError: it holds objects, which `weights_only` (PyTorch's default) forbids.
    """
    folder = _whole(folder)
    rest = read(folder / _META, "cpu", weights_only)
    reader = FolderReader(folder, weights_only)
    metadata = reader.read_metadata()
    stored, left = metadata.state_dict_metadata, stored_tensors(folder, metadata) if in_parts else {}
    read_now = {name: kind for name, kind in stored.items() if wanted(name) and name not in left}
    values = {name: _place_for(kind, room=partial(room, name)) for name, kind in read_now.items()}
    if values:
        with _alone_on_purpose(), _own_errors(folder):
            dcp.load(values, storage_reader=reader, planner=FolderPlanner(folder, weights_only), no_dist=True)
    values = {name: value.local if isinstance(value, TensorSlice) else value for name, value in values.items()}
    values |= {name: value.read() if value.is_small else value for name, value in left.items() if wanted(name)}
    names = rest.pop(_NAMES)
    rest["state_dict"] = {
        name: values.get(f"state_dict/{name}", _place_for(stored[f"state_dict/{name}"], "meta")) for name in names
    }
    for name, value in values.items():
        if name.startswith("optimizer/"):
            _, number, parameter, field = name.split("/", 3)
            rest["optimizer_states"][int(number)]["state"].setdefault(int(parameter), {})[field] = value
    for state in rest.get("optimizer_states", []):
        state["state"] = dict(sorted(state["state"].items()))
    return rest


def is_sharded(path: Path) -> bool:
    """Whether there is a folder at a path, or was a moment ago."""
    return path.is_dir() or (not path.exists() and _old(path).is_dir())


def consolidate(folder: Path, file: Path, weights_only: bool | None = None) -> None:
    """Make one file of a folder: what `trainer.save_checkpoint` writes in one process."""
    write(load_sharded(folder, weights_only=weights_only), file)


def _flat(checkpoint: Mapping[str, Any]) -> Flat:
    """This rank's tensors (and other values of its state) by name."""
    flat = {f"state_dict/{name}": value for name, value in checkpoint["state_dict"].items()}
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        for parameter, fields in optimizer["state"].items():
            flat |= {f"optimizer/{number}/{parameter}/{field}": value for field, value in fields.items()}
    return flat


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """torch.distributed.checkpoint warns where a process reads or writes without the others, and of itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # its own, before torch 2.10
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def _own_errors(folder: Path) -> Iterator[None]:
    """Words for a damaged folder in place of torch.distributed.checkpoint's."""
    try:
        with unwrapped_errors():
            yield
    except (RuntimeError, EOFError, AssertionError, KeyError) as error:
        raise ValueError(
            f"{folder} cannot be read as a sharded checkpoint ({type(error).__name__}: {error}). It is damaged; use an"
            " older checkpoint."
        ) from error


def _place_for(
    kind: Any, device: str = "cpu", room: Callable[[TensorStorageMetadata], TensorSlice | None] = lambda kind: None
) -> Tensor | None:
    """Room for a stored tensor; None for another object."""
    if not isinstance(kind, TensorStorageMetadata):
        return None
    if (part := room(kind)) is not None:
        return part
    return torch.empty(kind.size, dtype=kind.properties.dtype, device=device)


def _put_in_place(part: Path, folder: Path) -> None:
    """Rename; a folder that was there has another name for the moment between, under which `load_sharded` finds it."""
    old = _old(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(part, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _whole(folder: Path) -> Path:
    if not folder.exists() and _old(folder).exists():
        folder = _old(folder)
    if not folder.exists():
        raise FileNotFoundError(f"Checkpoint folder not found: {folder}")
    missing = [name for name in (_META, ".metadata") if not (folder / name).exists()]
    if missing:
        raise ValueError(
            f"{folder} holds no whole sharded checkpoint: {' and '.join(missing)} missing. Give the folder that"
            ' PipelineStrategy(state_dict_type="sharded") wrote.'
        )
    return folder


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
