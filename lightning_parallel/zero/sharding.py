"""`Sharding`: modules made FSDP2's for the time of a run, and given back as they were.

The one idea: `fully_shard` changes a module's class, its hooks and its parameters. What it adds is noted while it does
so, and taken away at the end; so the same module may train again, on other ranks or none, without knowing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lightning_parallel.zero.footprints import Footprints


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
        self._footprints = Footprints(module.modules())
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
        self._footprints.noted()

    def undo(self) -> None:
        """Every parameter becomes a whole one on the host, on every rank; the modules are as they were. Collective."""
        whole = whole_parameters(self.module)
        for module in self._footprints.remove():
            _module_state_mapping.pop(module, None)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = whole.get(parameter, parameter)


def whole_parameters(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """For each sharded parameter of a module a whole one on the host; all ranks call it."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            values = parameter.full_tensor().detach().cpu().clone()
            found[parameter] = nn.Parameter(values, parameter.requires_grad)
    return found
