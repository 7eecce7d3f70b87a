"""Swap a module's class for a subclass of it with another `forward` or `__call__`, and back.

The one idea: the module stays the object it is, with its names and hooks, and `isinstance` says of it what it said.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_classes: dict[tuple[type, type], type] = {}


def become(module: nn.Module, style: type, part: Any) -> None:
    """Swap a module's class for a subclass in that style, which finds `part` under the style's own name for it."""
    cls, key = type(module), next(iter(style.__annotations__), "_tensor_part")
    if (style, cls) not in _classes:
        names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_tensor_base": cls}
        _classes[style, cls] = type(cls.__name__, (style, cls), names)
    module.__class__ = _classes[style, cls]
    module.__dict__[key] = part


def own_class(module: nn.Module) -> type:
    """The class that a module had before it was cut."""
    cls: Any = type(module)
    while "_tensor_base" in vars(cls):
        cls = cls._tensor_base
    return cls


def become_itself(module: nn.Module) -> None:
    """Give a module its own class back."""
    if (own := own_class(module)) is not type(module):
        module.__class__ = own
    for key in ("_tensor_part", "_tensor_scope", "_tensor_check", "_tensor_block", "_tensor_whole"):
        module.__dict__.pop(key, None)
