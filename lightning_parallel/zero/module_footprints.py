"""What a library leaves on modules while it wraps them, so that it can be taken away again.

The one idea: classes, hooks and attributes are noted before and after; what is new is what has to go. So the same
module may train again, on other ranks or none, without knowing of it. Left out: parameters, which each user of this
puts back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class _Before:
    """What a module was: its class, the names in its dictionary, and the keys in each dictionary of hooks."""

    kind: type
    names: set[str]
    hooks: dict[str, set[Any]]

    @staticmethod
    def of(module: nn.Module) -> _Before:
        return _Before(type(module), set(vars(module)), {name: set(hooks) for name, hooks in _hooks(module).items()})


class Footprints:
    """Notes modules as they are; `noted` after they were changed, `remove` to give them back.

    Args:
        modules: that are about to be changed.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> prints = Footprints([layer])
        >>> _ = layer.register_forward_hook(print); layer.mark = 1
        >>> prints.noted(); modules = prints.remove()
        >>> len(layer._forward_hooks), hasattr(layer, "mark")
        (0, False)
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = {module: _Before.of(module) for module in modules}
        self._added: dict[nn.Module, tuple[type, set[str], dict[str, set[Any]]]] = {}

    def noted(self) -> None:
        """What is there now and was not before is the library's."""
        self._added = {module: _added(module, was) for module, was in self._before.items()}
        self._before = {}

    def remove(self) -> list[nn.Module]:
        """Take it away; returns the modules."""
        modules = list(self._added)
        for module, (kind, names, hooks) in self._added.items():
            for name in names:
                vars(module).pop(name, None)
            for name, keys in hooks.items():
                for key in keys:
                    _hooks(module)[name].pop(key, None)
            module.__class__ = kind
        self._added = {}
        return modules


def _hooks(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {name: value for name, value in vars(module).items() if name.endswith("_hooks") and isinstance(value, dict)}


def _added(module: nn.Module, was: _Before) -> tuple[type, set[str], dict[str, set[Any]]]:
    hooks = {name: set(keys) - was.hooks.get(name, set()) for name, keys in _hooks(module).items()}
    return was.kind, set(vars(module)) - was.names, hooks
