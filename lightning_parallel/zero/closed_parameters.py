"""Parameters whose memory is freed: whoever reads their values is told so, in words.

The one idea: a parameter that is closed is of a class of its own for that time, so that PyTorch asks here before an
operator or an attribute sees it. What it is like (shape, dtype, device, its gradient) may be asked for, its values may
not; `data` and `detach()` give this rank's part of them, for what goes element by element, as averages of weights do.
Within a forward whoever reads values is lent the whole parameter. An open one is of its own class and pays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from lightning_parallel.zero.sharded_gradient import ShardedGradient, ShardedValues

_SHOW_VALUES = {"T", "mT", "H", "mH", "real", "imag"}  # attributes
_MAY = {
    *("__get__", "__set__", "__delete__", "__hash__", "__len__", "__repr__", "__dir__", "requires_grad_"),
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "untyped_storage"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_shared", "get_device", "data_ptr"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),  # optimizers that make their state at construction
    *("register_hook", "register_post_accumulate_grad_hook"),
    *("_has_compatible_shallow_copy_type", "to", "cpu", "cuda"),  # `module.to`
    *("type", "double", "float", "half", "bfloat16"),
}
_CASTS = {"to", "cpu", "cuda", "type", "double", "float", "half", "bfloat16"}
_ASSIGN = {"__setitem__", *(f"__i{x}__" for x in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))}
Lend = Callable[[nn.Parameter], None]
_lend: list[Lend | None] = [None]
_for_shapes = [False]


@contextmanager
def only_shapes() -> Iterator[None]:
    """Whoever computes inside wants shapes and no values: closed parameters read NaN."""
    before, _for_shapes[0] = _for_shapes[0], True
    try:
        yield
    finally:
        _for_shapes[0] = before


@dataclass
class KeptPart:
    """What a rank keeps of a closed parameter.

    Args:
        name: of the parameter.
        part: its elements from `begin` to `end`, 1-D.
        group: the ranks that keep the others.
        wide: what the optimizer updates in place of the part, if that has more bits.
        lost: whether the run has failed, so that nobody gathers the other elements any more.
        words: said to whoever uses the values, where there is no part to give: with {what} and {name}.
    """

    name: str
    part: Tensor
    begin: int
    end: int
    group: Any
    wide: Tensor | None = None
    lost: bool = False
    words: str = ""

    def values(self, like: Tensor) -> ShardedValues:
        """The part, with the shape of the parameter."""
        return ShardedValues(self.part, like, self.group, self.begin)

    @torch.no_grad()
    def take(self, source: Tensor) -> None:
        """Take over this rank's elements of a whole tensor, or of one that is divided alike."""
        divided = isinstance(source, ShardedGradient)
        elements = source.local if divided else source.detach().reshape(-1)[self.begin : self.end]  # type: ignore[attr-defined]
        self.part.copy_(elements)
        if self.wide is not None:
            self.wide.copy_(elements)


def lend_in_forward(lend: Lend | None) -> None:
    """A forward begins, or ends (None). Within one, `data` of closed parameters is refused too.

    Args:
        lend: makes a closed parameter whole that the forward reads, or raises.
    """
    _lend[0] = lend


class Closed:
    """What is mixed into a parameter's class while it is closed."""

    _kept: KeptPart

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, attribute = func.__name__, ""
        if name in ("__get__", "__set__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if func == torch.equal:  # of parameters it is asked whether they are the same one
            return args[0] is args[1]
        shows, lend = name not in _MAY or attribute in _SHOW_VALUES, _lend[0]
        if lend is not None and (shows or name in _CASTS) and not _for_shapes[0] and not _writes(name, args):
            for parameter in _closed_of([*args, *(kwargs or {}).values()]):
                with torch._C.DisableTorchFunctionSubclass():  # who lends gives the parameter itself other memory
                    lend(parameter)
            return func(*args, **(kwargs or {}))
        is_part = (
            attribute == "data" and name == "__get__"
        ) or name == "detach"  # whoever takes `data` may write to it
        if is_part and not _for_shapes[0] and not _has_no_part(args[0]):
            return args[0]._kept.values(args[0]) if lend is None else _refuse(attribute or name, args)
        if attribute == "data" and name == "__set__" and not _for_shapes[0]:
            return _set_data(*args)
        if name in _CASTS and not _for_shapes[0]:
            return _converted(func, args, kwargs or {})
        if name == "copy_" and not any(isinstance(x, Closed) and x._kept.words for x in args):
            return _copy(*args)
        if shows and not _for_shapes[0]:
            _refuse(attribute or name, [*args, *(kwargs or {}).values()])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refuse("deepcopy", [self])


@lru_cache(maxsize=256)
def _closed(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return cast(type[nn.Parameter], type(kind.__name__, (Closed, kind), {"__module__": kind.__module__}))


def close(parameter: nn.Parameter, kept: KeptPart) -> None:
    """From now on nobody may read the parameter's values."""
    if not isinstance(parameter, Closed):
        parameter.__class__ = _closed(type(parameter))
        parameter.__dict__["_kept"] = kept


def lose(parameter: nn.Parameter, name: str, shape: torch.Size) -> None:
    """The run has failed, and other ranks had elements of a parameter: reading it raises, until whole values are copied
    into it.

    Example:
        >>> w = nn.Parameter(torch.zeros(1))
        >>> lose(w, "w", torch.Size([2]))
        >>> _ = w.sum()  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ValueError: `sum` reads parameter `w`, of which this process has a part: ...
        >>> _ = w.copy_(torch.ones(2)); w.detach()
        tensor([1., 1.])
    """
    if not isinstance(parameter, Closed):
        parameter.grad = None
        parameter.data = torch.full((), float("nan"), dtype=parameter.dtype).expand(shape)
        close(parameter, KeptPart(name, parameter.new_empty(0), 0, 0, None))
    parameter._kept.lost = True  # type: ignore[attr-defined]


def reopen(parameter: nn.Parameter) -> None:
    """The parameter is as any other again."""
    if isinstance(parameter, Closed):
        parameter.__class__ = type(parameter).__mro__[2]
        del parameter.__dict__["_kept"]


def part_of(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, which may be closed; its values, detached."""
    return parameter._kept.part if isinstance(parameter, Closed) else parameter.detach()


def put_data(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter, which may be closed, other memory."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = values


def _set_data(parameter: Any, values: Tensor) -> None:
    """`w.data = values` of a closed parameter: its part is taken over."""
    kept: KeptPart = parameter._kept
    if values is parameter:
        return
    if _is_moved_with_its_module():
        put_data(parameter, values)
        return
    if _lend[0] is not None or kept.words or kept.lost or values.shape != parameter.shape:
        _refuse("data", [parameter])
    kept.take(values)


def _converted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`p.to(...)`, `p.double()`: a closed one may move with its module and keeps its dtype; its values are not here."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    parameter = args[0]
    if not isinstance(result, Tensor) or result is parameter:
        return result
    if result.dtype != parameter.dtype or not _is_moved_with_its_module():
        _refuse(func.__name__, args)
    return result


def _is_moved_with_its_module() -> bool:
    """Whether a caller is `nn.Module._apply`."""
    frame: Any = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code is nn.Module._apply.__code__:
            return True
        frame = frame.f_back
    return False


def _copy(target: Any, source: Any, *_: Any) -> Any:
    """`target.copy_(source)`, of which one or both are closed: averages, and weights that are loaded."""
    if isinstance(source, Closed):
        source = source._kept.values(cast(Tensor, source))
    if isinstance(target, Closed) and target._kept.lost:
        values = source.detach().to(target.dtype, copy=True).reshape(target.shape)  # type: ignore[attr-defined]
        reopen(cast(nn.Parameter, target))
        target.data = values  # type: ignore[attr-defined]
        return target
    if isinstance(target, Closed):
        target._kept.take(source)
        return target
    return target.copy_(source)


def _has_no_part(parameter: Any) -> bool:
    return isinstance(parameter, Closed) and bool(parameter._kept.lost or parameter._kept.words)


def _writes(name: str, args: Any) -> bool:
    """Whether an operator writes to closed parameters, which no forward may: it would be lost."""
    in_place = name in _ASSIGN or (name.endswith("_") and not name.endswith("__"))
    return in_place and bool(_closed_of(args[:1]))


def _closed_of(arguments: Any) -> list[Any]:
    return [x for x in _flat(arguments) if isinstance(x, Closed)]


def _refuse(what: str, arguments: Any) -> NoReturn:
    closed = _closed_of(arguments)
    name = closed[0]._kept.name if closed else "?"
    if closed and closed[0]._kept.words:
        raise ValueError(closed[0]._kept.words.format(what=what, name=name))
    if closed and closed[0]._kept.lost:
        raise ValueError(
            f"`{what}` reads parameter `{name}`, of which this process has a part: the run that divided it has failed,"
            " and the other parts were in other processes. Load a state dict into the module (a checkpoint's, with"
            " strict=True), or build the module anew."
        )
    raise ValueError(
        f"`{what}` reads parameter `{name}`, of which zero_stage=3 leaves this rank a part. In a hook, read it inside"
        " `with trainer.strategy.whole_parameters():`, on all ranks. In a step that gathers by micro-batch, read it in"
        ' a forward, not in a hook of a backward; or use gather="step".'
    )


def _flat(arguments: Any) -> list[Any]:
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return [arguments]
    return [x for argument in arguments for x in _flat(argument)]
