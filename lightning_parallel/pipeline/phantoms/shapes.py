"""What an operator gives, from shapes alone.

The one idea: torch's meta tensors say it, and are asked once for each operator and shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline.phantoms.stand_in import StandIn

_inferred: dict[Any, Tensor] = {}


def infer(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives on meta tensors; remembered where it gives one new tensor, since asking is slow."""
    try:
        key = (func, _key(args), _key(tuple(kwargs.items())))
        if key in _inferred:
            return _inferred[key]
    except TypeError:  # an argument that cannot be a key
        key = None
    result = func(*_on_meta(args), **_on_meta(kwargs))
    if key is not None and isinstance(result, Tensor) and not func._schema.is_mutable and len(_inferred) < 4096:
        _inferred[key] = result
    return result


def made_real(tree: Any) -> Any:
    """An operator's arguments with memory: a draw moves the generators as it does on the stage that has the data."""
    return tree_map_only(
        StandIn, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1), tree
    )


def _key(x: Any) -> Any:
    if isinstance(x, Tensor):
        meta = x.meta if isinstance(x, StandIn) else x
        return (tuple(meta.shape), meta.stride(), meta.storage_offset(), meta.dtype)
    if isinstance(x, (tuple, list)):
        return tuple(_key(entry) for entry in x)
    return (type(x), x)


def _on_meta(tree: Any) -> Any:
    """An operator's arguments with every tensor on the meta device."""
    if isinstance(tree, Tensor):  # metas are shared: an operator in place gets one of its own
        return tree.meta.detach() if isinstance(tree, StandIn) else tree.detach().to("meta")
    if isinstance(tree, (tuple, list)):
        return [_on_meta(x) for x in tree]
    if isinstance(tree, dict):
        return {key: _on_meta(x) for key, x in tree.items()}
    return tree
