"""Who used a parameter of another stage: the step itself, or a part of a module that it called past the module.

The one idea: calls between stages are followed where modules are called. A method of such a module, or a module inside
it, called by the step itself runs on every stage; what it then reads says little of what was done. The call is found
among Python's frames, once, for the message.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_CALLS = {"__call__", "_call_impl", "_wrapped_call_impl"}


def called_past_its_module(parameter: Tensor) -> str | None:
    """What the step calls, in words, if it is not a whole module that a stage holds; None where it uses `parameter`."""
    names: dict[int, tuple[str, bool]] = {}  # of the modules inside units and of units: (name, whether it is a unit)
    for module, method in _frames_with(parameter):  # the step first
        within = _units_inside(module)
        if within:
            names = within
        elif id(module) in names:
            name, is_unit = names[id(module)]
            unit = f"`{name}`" if is_unit else f"the module around `{name}`"
            call = f"`{name}.{method}`" if is_unit or method != "forward" else f"`{name}`"
            return f"{call} itself, not {unit}"
    return None


def _frames_with(parameter: Tensor) -> Iterator[tuple[nn.Module, str]]:
    """The methods that run and whose modules hold the parameter, the outermost first."""
    for frame in reversed(inspect.stack(0)):
        module, method = frame.frame.f_locals.get("self"), frame.function
        if isinstance(module, nn.Module) and method not in _CALLS and any(p is parameter for p in module.parameters()):
            yield module, method


def _units_inside(root: nn.Module) -> dict[int, tuple[str, bool]]:
    """Names of the units strictly inside a module, and of what is inside of them."""
    found: dict[int, tuple[str, bool]] = {}
    for module in root.modules():
        hook: Any = module.__dict__.get("_pipeline_hook")
        if hook is not None and module is not root:
            found |= {id(part): (f"{hook.name}.{name}", False) for name, part in hook.inside}
            found[id(module)] = (hook.name, True)
    return found
