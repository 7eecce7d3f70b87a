"""Numbers of tensors that FSDP2 shards: a norm, a sum or a maximum of a `DTensor` is that of the whole tensor.

PyTorch leaves such a result "partial", and `float(p.norm())` then reads one rank's part of it. While a module is
sharded here, reductions to one number are made whole when they are computed, and what else is read as a number before
it is read. All ranks have to ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_parallel.zero.reducer import Waiting

aten = torch.ops.aten
_REDUCTIONS = (
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.prod.default,
    aten.max.default, aten.min.default, aten.amax.default, aten.amin.default, aten.any.default, aten.all.default,
    aten.linalg_vector_norm.default,
)  # fmt: skip
# Of shards that differ in length PyTorch 2.9 averages the averages.
_SUMS_OF = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}
_READ = aten._local_scalar_dense.default
_WHAT = "the other ranks to read the same number of a divided tensor"


class WholeScalars:
    """Makes numbers of sharded tensors whole until `remove` is called.

    Args:
        waiting: a context entered while this process is blocked.

    Raises:
        RuntimeError: PyTorch's `DTensor` has no place for it in this version.
    """

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._handlers: dict[Any, Callable[..., Any]] | None = _handlers()
        self._before = {op: self._handlers.get(op) for op in (*_REDUCTIONS, _READ)}
        for op in _REDUCTIONS:
            self._handlers[op] = self._reduce
        self._handlers[_READ] = self._read

    def remove(self) -> None:
        """Numbers are as PyTorch has them again."""
        handlers, self._handlers = self._handlers, None
        if handlers is None:
            return
        for op, handler in self._before.items():
            if handler is None:
                handlers.pop(op, None)
            else:
                handlers[op] = handler

    def _read(self, op: Any, args: Any, kwargs: Any) -> Any:
        return op(self._whole(args[0]))

    def _reduce(self, op: Any, args: Any, kwargs: Any) -> Any:
        dtype = kwargs.get("dtype") or args[0].dtype
        if op in _SUMS_OF and dtype.is_floating_point:
            # In 16 bits a sum may overflow where its mean does not.
            total = _SUMS_OF[op](*args, **{**kwargs, "dtype": torch.promote_types(dtype, torch.float32)})
            return (total / (args[0].numel() // max(total.numel(), 1))).to(dtype)
        assert self._handlers is not None
        own, before = self._handlers.pop(op), self._before[op]
        if before is not None:
            self._handlers[op] = before
        try:
            result = op(*args, **kwargs)
        finally:
            self._handlers[op] = own
        return result if not isinstance(result, DTensor) or result.dim() else self._whole(result)

    def _whole(self, number: DTensor) -> torch.Tensor:
        with self._waiting(_WHAT):
            return number.full_tensor()


def _handlers() -> dict[Any, Callable[..., Any]]:
    """PyTorch's table of operators that a `DTensor` leaves to a function."""
    found = getattr(DTensor._op_dispatcher, "_custom_op_handlers", None)
    if not isinstance(found, dict):
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no table of DTensor's operators where this version of lightning_parallel"
            " looks for it, so numbers read off divided tensors would be one rank's. Use a version of PyTorch between"
            ' 2.9 and 2.13, or ZeROStrategy(stage=2, engine="native").'
        )
    return found
