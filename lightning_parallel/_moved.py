"""Old import paths: a module that is an alias gives the names of the module that took its place, and says so.

The one idea: the warning comes where a name is used, with the new path of that name, and nothing is imported before.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """What an alias has as its ``__getattr__``.

    Args:
        old: the alias.
        new: the module whose names it gives.
    """

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        warnings.warn(f"{old}.{name} is {new}.{name} now.", DeprecationWarning, stacklevel=2)
        return value

    return get
