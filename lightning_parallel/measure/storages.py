"""How many bytes tensors hold: each piece of memory counted once, whoever views it.

The one idea: memory belongs to storages, not to tensors. Views, tied weights and the weight that a layer saves for its
backward share a storage, so what is counted is storages that were not seen before. Stand-ins for what another stage
holds, and tensors on the meta device, have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_parallel.pipeline.phantoms.phantom import Phantom

Key = int  # of a storage while it lives


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold a tensor's data: one, or those of its parts for sparse and wrapped tensors.

    Example:
        >>> [storage.nbytes() for storage in storages_of(torch.zeros(4)[1:])]
        [16]
    """
    if isinstance(tensor, Phantom) or tensor.is_meta:
        return
    if (part := getattr(tensor, "ds_tensor", None)) is not None:  # of a parameter that DeepSpeed has divided
        yield from storages_of(part)
    if is_traceable_wrapper_subclass(tensor):
        parts: Any = tensor
        for part in (getattr(tensor, name) for name in parts.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):  # a DTensor names its mesh too
                yield from storages_of(part)
    elif tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices().untyped_storage(), tensor._values().untyped_storage())


def key_of(storage: torch.UntypedStorage) -> Key:
    """What tells a storage from all others that live at the same time."""
    return storage._cdata


def count_bytes(tensors: Iterable[Tensor], device_type: str, seen: set[Key]) -> int:
    """Bytes of the tensors' storages on a kind of device, without those in ``seen``, to which they are added.

    Example:
        >>> seen, row = set(), torch.zeros(4)
        >>> count_bytes([row, row[:2], torch.zeros(2)], "cpu", seen), count_bytes([row], "cpu", seen)
        (24, 0)
    """
    total = 0
    for tensor in tensors:
        for storage in storages_of(tensor):
            key = key_of(storage)
            if key not in seen and storage.device.type == device_type:
                seen.add(key)
                total += storage.nbytes()
    return total


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested mappings, lists and tuples, such as an optimizer's state."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)
