"""`torch.compile` and the cut: a compiled block runs as one piece, and what is compiled must lie between two cuts.

The one idea: a stage decides at every call of a block whether it computes, and a compiler that looks through several
blocks would fix these decisions in one program. So blocks, and what is inside them, may be compiled; what holds blocks
may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def replaces_forward(module: nn.Module) -> bool:
    """Whether a module's forward was replaced on the instance, by something else than `torch.compile`."""
    return "forward" in vars(module) and not _is_wrapper(module)


def refuse_compiled_around(model: nn.Module, units: Sequence[str]) -> None:
    """Raise if a module that is cut into several units is compiled as a whole.

    Raises:
        ValueError: naming the module and a remedy.
    """
    for name, module in model.named_modules():
        inside = [unit for unit in units if unit != name and (unit.startswith(f"{name}.") or not name)]
        if inside and is_compiled(module):
            raise ValueError(
                f"`{name or type(module).__name__}` is compiled as a whole, and the pipeline cuts it into {inside[0]},"
                " ... . Compile the blocks one by one instead: for block in blocks: block.compile()."
            )


def _is_wrapper(module: Any) -> bool:
    """Whether a module is what `torch.compile(module)` returns."""
    return isinstance(vars(module).get("_modules", {}).get("_orig_mod"), nn.Module) and "dynamo_ctx" in vars(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was called on a module itself."""
    return _is_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None
