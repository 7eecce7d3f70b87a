"""Logits of which a rank holds some columns, for code that thinks it has all of them.

The one idea: between a head and its loss unmodified code takes rows, changes the shape of all dims but the last and
casts; these are done to the columns. `F.cross_entropy` of the result is the vocabulary-parallel one. Whatever else is
asked for gets the logits whole, gathered at that moment; all ranks have to ask, as all run the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from lightning_parallel.parallel.axis import TensorAxis
from lightning_parallel.parallel.cross_entropy import vocab_parallel_cross_entropy
from lightning_parallel.parallel.operators import gather_features

_Handler = Callable[..., Any]


class VocabLogits(Tensor):
    """Logits [.., V] by this rank's columns.

    Args:
        local: float [.., k], this rank's columns.
        features: V.
        begin: number of the first column.
        axis: the ranks.
    """

    local: Tensor
    features: int
    begin: int
    axis: TensorAxis

    @staticmethod
    def __new__(cls: type[VocabLogits], local: Tensor, features: int, begin: int, axis: TensorAxis) -> VocabLogits:
        shape = (*local.shape[:-1], features)
        made: VocabLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.features, made.begin, made.axis = local, features, begin, axis
        return made

    def whole(self) -> Tensor:
        """All columns; all ranks call it."""
        missing = -(-self.features // self.axis.size) - self.local.shape[-1]
        return gather_features(F.pad(self.local, (0, missing)) if missing else self.local, self.axis, self.features)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _HANDLERS and isinstance(args[0], VocabLogits):
            result = _HANDLERS[func](func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(VocabLogits, VocabLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(
            f"`{func}` was handed the head's logits past torch's functions, and a rank has only its columns of them."
            " Use loss_parallel=False."
        )

    def _with(self, local: Tensor) -> VocabLogits:
        return VocabLogits(local, self.features, self.begin, self.axis)


def _same(func: Any, x: VocabLogits, *args: Any, **kwargs: Any) -> Any:
    """What acts on each value by itself."""
    return x._with(func(x.local, *args, **kwargs))


def _own(func: Any, x: VocabLogits, *args: Any) -> Any:
    """What is asked of autograd."""
    return func(x.local, *args)


def _reshape(func: Any, x: VocabLogits, *shape: Any, **kwargs: Any) -> Any:
    """`view` and `reshape` that leave the last dim."""
    sizes: Sequence[Any] = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    if kwargs or not sizes or sizes[-1] != x.features:
        return NotImplemented
    return x._with(func(x.local, (*sizes[:-1], x.local.shape[-1])))


def _flatten(func: Any, x: VocabLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return x._with(func(x.local, start_dim, end_dim))


def _index(func: Any, x: VocabLogits, index: Any) -> Any:
    """Indices and slices of all dims but the last, of which everything is taken."""
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(isinstance(part, (int, slice)) or part is Ellipsis for part in parts)
    if not plain:
        return NotImplemented
    named = len([part for part in parts if part is not Ellipsis])
    reaches_last = named == x.dim() or (Ellipsis in parts and parts[-1] is not Ellipsis)
    if reaches_last and parts[-1] != slice(None):
        return NotImplemented
    return x._with(func(x.local, index))


def _cross_entropy(
    func: Any, x: VocabLogits, target: Tensor, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    numbers = not target.is_floating_point() and x.dim() == 2 and target.dim() == 1
    if not numbers or weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return NotImplemented
    return vocab_parallel_cross_entropy(x.local, target, x.begin, x.axis, ignore_index, reduction)


_OF_SHAPE: set[Any] = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point, Tensor.__len__,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta")),
}  # fmt: skip
_HANDLERS: dict[Any, _Handler] = {
    **dict.fromkeys((Tensor.float, Tensor.to, Tensor.contiguous, Tensor.detach, Tensor.clone), _same),
    **{getattr(Tensor, name).__get__: _own for name in ("requires_grad", "grad_fn")},
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
    Tensor.__getitem__: _index,
    F.cross_entropy: _cross_entropy,
}
