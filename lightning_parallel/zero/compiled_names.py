"""Names as the user wrote them where `torch.compile(module)` has put a wrapper in a module's place.

The one idea: the wrapper adds a level, `_orig_mod`, to every name; checkpoints are to fit the model compiled or not. So
state dicts lose the level when they are made and get it when they are loaded.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn

LEVEL = "_orig_mod."


def clean_name(name: str) -> str:
    """A name without the level.

    Example:
        >>> clean_name("net._orig_mod.0.weight")
        'net.0.weight'
    """
    return name.replace(LEVEL, "")


def clean_state_dicts(module: nn.Module) -> None:
    """Let state dicts of a module have the names that they have without compiling; safe to call again."""
    for part in module.modules():
        if hasattr(part, LEVEL[:-1]) and _drop not in part._state_dict_hooks.values():
            part.register_state_dict_post_hook(_drop)
            part.register_load_state_dict_pre_hook(_add)


def _drop(module: nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
    level = prefix + LEVEL
    for name in [name for name in state if name.startswith(prefix)]:  # in order
        state[prefix + name.removeprefix(level) if name.startswith(level) else name] = state.pop(name)


def _add(module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
    level = prefix + LEVEL
    for name in [name for name in state if name.startswith(prefix) and not name.startswith(level)]:
        state[level + name.removeprefix(prefix)] = state.pop(name)
