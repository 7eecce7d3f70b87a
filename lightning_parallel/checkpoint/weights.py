"""Weights from a file into a module of which a rank holds only a part, reading no more than that part.

The one idea: `load_weights` may be called where the module is built. Where its parameters have no memory yet (in
`configure_model` under a pipeline), the wish is noted, and fulfilled when this rank's parameters have been made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.checkpoint.files import read
from lightning_parallel.pipeline.phantoms.phantom import Phantom

_WISHES = "_weights_to_load"
Part = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class _Wish:
    path: Path
    prefix: str
    strict: bool


def load_weights(module: nn.Module, path: str | Path, prefix: str = "", strict: bool = True) -> None:
    """Copy weights from a file into a module, on every rank those that it holds.

    Args:
        module: the LightningModule; call this in `__init__`, `configure_model` or a later hook.
        path: a `.safetensors` file, a `.json` index of several (as on the Hugging Face hub), or a file of `torch.save`
            with a state dict, a Lightning checkpoint among them.
        prefix: what the module's names have before those of the file, e.g. `"net."`.
        strict: whether all names under `prefix` must be in the file, and all of the file's in the module.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: names or shapes do not fit, or the file is damaged.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> load_weights(module, "model.safetensors")  # doctest: +SKIP
    """
    wish = _Wish(Path(path), prefix, strict)
    _names_fit(module, wish)
    if any(value.is_meta for value in _tensors(module).values() if not isinstance(value, Phantom)):
        vars(module).setdefault(_WISHES, []).append(wish)
    else:
        _load(module, wish)


def load_noted(
    module: nn.Module, part: Part = lambda name, value: value, done: Collection[Tensor] = frozenset()
) -> None:
    """Fulfil what `load_weights` noted, now that this rank's parameters have memory.

    Args:
        module: the LightningModule.
        part: this rank's part of the whole tensor of that name, if the module has no more of it.
        done: those that have their weights.
    """
    for wish in vars(module).pop(_WISHES, []):
        _load(module, wish, part, lambda value: value not in done)


def load_noted_into(module: nn.Module, parameters: Collection[Tensor], part: Part = lambda name, value: value) -> None:
    """Fulfil what `load_weights` noted for some of the module's parameters; `load_noted` does the rest."""
    for wish in vars(module).get(_WISHES, []):
        _load(module, wish, part, lambda value: value in parameters)


def _load(
    module: nn.Module,
    wish: _Wish,
    part: Part = lambda name, value: value,
    wanted: Callable[[Tensor], bool] = lambda value: True,
) -> None:
    tensors = _tensors(module)
    mine = {name: value for name, value in tensors.items() if not isinstance(value, Phantom) and wanted(value)}
    readers = _readers(wish.path)
    with torch.no_grad():
        for name, value in mine.items():
            key = name.removeprefix(wish.prefix)
            if name.startswith(wish.prefix) and key in readers:
                stored = readers[key]()
                if stored.shape != value.shape:
                    stored = part(name, stored)
                if stored.shape != value.shape:
                    raise ValueError(
                        f"{wish.path} has `{key}` of shape {tuple(stored.shape)}, but `{name}` of"
                        f" {type(module).__name__} has {tuple(value.shape)}. Build it as it was saved."
                    )
                value.copy_(stored)


def _names_fit(module: nn.Module, wish: _Wish) -> None:
    """Raise in strict mode if names are missing; a name of a tied parameter may be, if another one is there."""
    tensors, keys = _tensors(module), set(_readers(wish.path))
    wanted = {name: value for name, value in tensors.items() if name.startswith(wish.prefix)}
    found = {id(value) for name, value in wanted.items() if name.removeprefix(wish.prefix) in keys}
    missing = [name for name, value in wanted.items() if id(value) not in found]
    unexpected = sorted(keys - {name.removeprefix(wish.prefix) for name in wanted})
    if wish.strict and (missing or unexpected):
        raise ValueError(
            f"{wish.path} does not fit {type(module).__name__} with prefix={wish.prefix!r}: missing {missing[:5]},"
            f" unexpected {unexpected[:5]} ({len(missing)} and {len(unexpected)} in all). Set prefix, or strict=False."
        )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _readers(path: Path) -> Mapping[str, Callable[[], Tensor]]:
    """For each name in a file, what reads its tensor."""
    if path.suffix == ".json":
        files = json.loads(path.read_text())["weight_map"]
        return {
            key: reader for file in sorted(set(files.values())) for key, reader in _readers(path.parent / file).items()
        }
    if path.suffix == ".safetensors":
        return dict(_safetensors(path))
    stored = read(path, "cpu", weights_only=True)
    stored = stored.get("state_dict", stored)
    return {key: partial(_same, value) for key, value in stored.items() if isinstance(value, Tensor)}


def _safetensors(path: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} cannot be read as safetensors ({error}). It is damaged, or another kind of file."
        ) from error
    for key in file.keys():  # noqa: SIM118
        yield key, partial(file.get_tensor, key)


def _same(value: Tensor) -> Tensor:
    return value
