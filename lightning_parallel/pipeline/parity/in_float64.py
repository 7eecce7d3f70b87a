"""A model computes in float64, whatever dtype its parameters and inputs have.

The one idea: every operator gets its floating arguments in float64, and what it returns stays so. Nothing of the model
is written: parameters keep their dtype, and are converted where they are read. Left out: kernels that know 16 or 32
bits alone, and modules that compare dtypes (`nn.LSTM`); they fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline.phantoms.phantom import phantoms_in

_HALVES_AND_SINGLES = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_WIDER = {**_HALVES_AND_SINGLES, torch.complex64: torch.complex128, torch.complex32: torch.complex128}


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, operators compute in float64 and return it; views, and writes in place, keep the dtype of their target.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> with in_float64():
        ...     made = layer(torch.ones(1, 2)).to(torch.float16)
        >>> made.dtype, layer.weight.dtype
        (torch.float64, torch.float32)
    """
    with _Functions(), _Operators():
        yield


class _Functions(TorchFunctionMode):
    """Functions that look at dtypes themselves (convolutions): asked again with float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            wide = _cast((args, kwargs), _WIDER.get)
            if phantoms_in(wide) or getattr(func, "__name__", "_").endswith("_"):
                raise
            return func(*wide[0], **wide[1])


class _Operators(TorchDispatchMode):
    """What all of it is made of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if phantoms_in(args) or phantoms_in(kwargs):
            return func(*args, **kwargs)
        returns = func._schema.returns
        if func._schema.is_mutable:
            return func(*args, **kwargs) if func in _ANY_DTYPE else _in_place(func, args, kwargs)
        if any(made.alias_info is not None for made in returns):
            return func(*args, **kwargs)  # a view
        if kwargs.get("dtype") in _WIDER:
            kwargs["dtype"] = _WIDER[kwargs["dtype"]]
        compute = _grouped_mm if func is torch.ops.aten._grouped_mm.default else func
        return _cast(compute(*_cast(args, _WIDER.get), **_cast(kwargs, _WIDER.get)), _WIDER.get)


_ANY_DTYPE = {torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor}


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that writes: all that it reads in the dtype of what it writes into."""
    named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    written = [named.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    target = next((x.dtype for x in written if isinstance(x, Tensor) and x.is_floating_point()), None)
    if target is None:
        return func(*args, **kwargs)
    floating = {*_HALVES_AND_SINGLES, torch.float64}

    def to_target(dtype: torch.dtype) -> torch.dtype | None:
        return target if dtype in floating and dtype != target else None

    return func(*_cast(args, to_target), **_cast(kwargs, to_target))


def _grouped_mm(rows: Tensor, experts: Tensor, offs: Tensor | None = None, bias: Any = None, **_: Any) -> Tensor:
    """Products of groups of rows [N, K] with [E, K, M]; offs [E]: where each group ends. torch's has no float64."""
    if offs is None or rows.dim() != 2 or experts.dim() != 3 or bias is not None:
        raise NotImplementedError("grouped products of other layouts than [N, K] by [E, K, M] in float64")
    made = rows.new_zeros(len(rows), experts.size(2))
    for expert, (begin, end) in zip(experts, pairwise([0, *offs.tolist()]), strict=True):
        made[begin:end] = rows[begin:end] @ expert
    return made


def _cast(tree: Any, wanted: Callable[[torch.dtype], torch.dtype | None]) -> Any:
    """Tensors of a structure in other dtypes; None: as they are."""

    def cast(x: Tensor) -> Tensor:
        dtype = wanted(x.dtype)
        return x if dtype is None else x.to(dtype)

    return tree_map_only(Tensor, cast, tree)


__all__ = ["in_float64"]
