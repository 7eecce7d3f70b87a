"""`Sharding`: modules made FSDP2's for the time of a run, and given back as they were.

The one idea: `fully_shard` changes a module's class, its hooks and its parameters. What it adds is noted while it does
so, and taken away at the end; so the same module may train again, on other ranks or none, without knowing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor


@dataclass
class _Before:
    """What a module was: its class, the names in its dictionary, and the keys in each dictionary of hooks."""

    kind: type
    names: set[str]
    hooks: dict[str, set[Any]]

    @staticmethod
    def of(module: nn.Module) -> _Before:
        return _Before(type(module), set(vars(module)), {name: set(hooks) for name, hooks in _hooks(module).items()})


class Sharding:
    """Shards blocks, then the roots that hold what is left.

    Args:
        module: the whole.
        blocks: in the order in which a forward calls them.
        roots: the module itself, or those of its children that are called by themselves.
        methods: names of the module's methods that are called in place of its forward.
        prefetch: gather a block while the one before it computes.
        **options: of `fully_shard`.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        roots: Sequence[nn.Module],
        methods: Sequence[str] = (),
        prefetch: bool = False,
        **options: Any,
    ) -> None:
        self.module = module
        before = {m: _Before.of(m) for m in module.modules()}
        for part in [*blocks, *roots]:
            if next(part.parameters(), None) is not None and not isinstance(part, FSDPModule):
                kind = type(part)
                fully_shard(part, **options)
                type(part).__name__ = kind.__name__  # summaries and profilers show it
        if isinstance(module, FSDPModule):
            for name in methods:
                register_fsdp_forward_method(module, name)
        if prefetch:
            for block, following in pairwise(blocks):
                block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        self._added = {m: _added(m, was) for m, was in before.items()}

    def undo(self) -> None:
        """Every parameter becomes a whole one on the host, on every rank; the modules are as they were. Collective."""
        whole = whole_parameters(self.module)
        for module, (kind, names, hooks) in self._added.items():
            for name in names:
                vars(module).pop(name, None)
            for name, keys in hooks.items():
                for key in keys:
                    _hooks(module)[name].pop(key, None)
            _module_state_mapping.pop(module, None)
            module.__class__ = kind
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = whole.get(parameter, parameter)
        self._added = {}


def whole_parameters(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """For each sharded parameter of a module a whole one on the host; all ranks call it."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            values = parameter.full_tensor().detach().cpu().clone()
            found[parameter] = nn.Parameter(values, parameter.requires_grad)
    return found


def _hooks(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {name: value for name, value in vars(module).items() if name.endswith("_hooks") and isinstance(value, dict)}


def _added(module: nn.Module, was: _Before) -> tuple[type, set[str], dict[str, set[Any]]]:
    hooks = {name: set(keys) - was.hooks.get(name, set()) for name, keys in _hooks(module).items()}
    return was.kind, set(vars(module)) - was.names, hooks
