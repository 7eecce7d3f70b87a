"""Files of somebody who means harm: unpickling one of them makes a folder, whose path the test looks at."""

import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

BUILT_OF = "posix.mkdir"  # what a forged pickle asks for


@dataclass(frozen=True)
class Charge:
    """Whoever unpickles it makes the folder `mark`."""

    mark: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)

    @property
    def went_off(self) -> bool:
        """Whether somebody has unpickled it."""
        return self.mark.exists()


def charged_metadata(folder: Path, charge: Charge) -> None:
    """Put a charge into the `.metadata` of an honest folder."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = charge
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def charged_meta(folder: Path, charge: Charge) -> None:
    """Put a charge beside what Lightning's loops keep."""
    charge_file(folder / "meta.pt", charge)


def charged_value(folder: Path, charge: Charge) -> None:
    """Make a value of an optimizer's state, which is no tensor, a charge."""
    name = "optimizer/0/0/momentum_buffer"
    with (folder / ".metadata").open("rb") as file:
        keep = [key for key in pickle.load(file).state_dict_metadata if key != name]
    values: dict[str, Any] = {}
    for key in keep:
        values[key] = _stored(folder, key)
    for path in [*folder.glob("*.distcp"), folder / ".metadata"]:
        path.unlink()
    with _alone():
        dcp.save({**values, name: charge}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def _stored(folder: Path, name: str) -> torch.Tensor:
    reader = dcp.FileSystemReader(folder)
    kind = reader.read_metadata().state_dict_metadata[name]
    found = {name: torch.empty(kind.size, dtype=kind.properties.dtype)}  # type: ignore[union-attr]
    with _alone():
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found[name]


@contextmanager
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def charge_file(path: Path, charge: Any) -> None:
    """Put a charge into a file of `torch.save`."""
    content = torch.load(path, weights_only=False)
    torch.save({**content, "more": charge}, path)


FOLDERS = {".metadata": charged_metadata, "meta.pt": charged_meta, "value": charged_value}
