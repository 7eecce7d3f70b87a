"""Parameters whose memory is freed: whoever reads their values is told so, in words.

The one idea: a parameter that is closed is of a class of its own for that time, so that PyTorch asks here before an
operator or an attribute sees it. What it is like (shape, dtype, device, its gradient) may be asked for, its values may
not. An open one is of its own class and pays nothing. Left out: `data` and `detach()` between steps, which state dicts
take of all parameters; what they give reads NaN.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn

_SHOW_VALUES = {"T", "mT", "H", "mH", "real", "imag"}  # attributes
_DETACHED = {"data", "detach"}
_MAY = {
    *("__get__", "__set__", "__delete__", "__hash__", "__len__", "__repr__", "__dir__", "requires_grad_", "detach"),
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "untyped_storage"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_shared", "get_device", "data_ptr"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),  # optimizers that make their state at construction
    *("register_hook", "register_post_accumulate_grad_hook"),
    *("_has_compatible_shallow_copy_type", "to", "cpu", "cuda"),  # `module.to`
    *("type", "double", "float", "half", "bfloat16"),
}
_in_forward = [False]


def watch_forward(runs: bool) -> None:
    """A forward begins or ends: within one, `data` and `detach()` of closed parameters are refused too."""
    _in_forward[0] = runs


class Closed:
    """What is mixed into a parameter's class while it is closed."""

    _name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, attribute = func.__name__, getattr(getattr(func, "__self__", None), "__name__", "")
        detaches = _in_forward[0] and (name in _DETACHED or (name == "__get__" and attribute in _DETACHED))
        if func == torch.equal:  # of parameters it is asked whether they are the same one
            return args[0] is args[1]
        if name not in _MAY or (name == "__get__" and attribute in _SHOW_VALUES) or detaches:
            raise _unread(attribute or name, [*args, *(kwargs or {}).values()])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _unread("deepcopy", [self])


@lru_cache(maxsize=256)
def _closed(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return cast(type[nn.Parameter], type(kind.__name__, (Closed, kind), {"__module__": kind.__module__}))


def close(parameter: nn.Parameter, name: str) -> None:
    """From now on nobody may read the parameter's values; `name`: for the message."""
    if not isinstance(parameter, Closed):
        parameter.__class__ = _closed(type(parameter))
        parameter.__dict__["_name"] = name


def reopen(parameter: nn.Parameter) -> None:
    """The parameter is as any other again."""
    if isinstance(parameter, Closed):
        parameter.__class__ = type(parameter).__mro__[2]
        del parameter.__dict__["_name"]


def _unread(what: str, arguments: Any) -> Exception:
    closed = [x for x in _flat(arguments) if isinstance(x, Closed)]
    name = closed[0]._name if closed else "?"
    return ValueError(
        f"`{what}` reads parameter `{name}`, of which zero_stage=3 leaves this rank a part. In a hook, read it inside"
        " `with trainer.strategy.whole_parameters():`, on all ranks. In a step that gathers by micro-batch, what is"
        " read outside of its block's call has to be read in the first step of its kind (training, ...) too; or"
        ' use gather="step".'
    )


def _flat(arguments: Any) -> list[Any]:
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return [arguments]
    return [x for argument in arguments for x in _flat(argument)]
