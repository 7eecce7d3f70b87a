"""A hash of a batch, by which ranks that should see the same rows find out whether they do.

The one idea: of tensors every byte counts, of other things what they show of themselves in any process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.batch.rows import leaves


def digest_of(batch: Any) -> str:
    """A hash of all values of a batch; equal batches of several processes have equal ones.

    Example:
        >>> digest_of((torch.ones(2), object())) == digest_of((torch.ones(2), object()))
        True
    """
    digest = hashlib.sha256()
    for leaf in leaves(batch):
        for part in _parts(leaf) if isinstance(leaf, Tensor) else [_shown(leaf).encode()]:
            digest.update(part)
    return digest.hexdigest()


def _parts(tensor: Tensor) -> Iterator[bytes]:
    """The bytes of a tensor of any layout."""
    if tensor.is_nested:
        dense = tensor.unbind()
    elif tensor.layout != torch.strided:
        sparse = tensor.to_sparse_coo().coalesce()
        dense = (sparse.indices(), sparse.values())
    else:
        dense = (tensor,)
    for part in dense:
        yield part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _shown(value: Any) -> str:
    """What an object shows of itself, but for where it lies in memory, which differs from rank to rank."""
    return re.sub(r"\b0x[0-9a-f]+", "", repr(value))
