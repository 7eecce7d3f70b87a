"""Writes that no stage can follow: what is not known here into what is, or into another shape.

The one idea: an operator's schema says what it writes into.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_parallel.pipeline.phantoms.errors import Overwritten, PhantomError, unread
from lightning_parallel.pipeline.phantoms.stand_in import StandIn


def refuse_writes(func: Any, args: Any, kwargs: Any, source: StandIn) -> StandIn | None:
    """Raise if a Phantom would be written into a real tensor; give the Phantom that is written in place, if any."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = args[i] if i < len(args) else kwargs.get(argument.name)
        for real in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(real, Tensor) and not isinstance(real, StandIn):
                raise Overwritten(unread(source, f"`{func}` writes it into a real tensor of shape {tuple(real.shape)}"))
        if isinstance(target, StandIn):
            return target
    return None


def refuse_reshape(func: Any, written: StandIn, result: Any) -> None:
    """A Phantom that was written in place must still have the shape that it shows."""
    if isinstance(result, Tensor) and (result.shape, result.stride()) != (written.shape, written.stride()):
        name = func._schema.name.split("::")[-1]
        raise PhantomError(
            f"The step changes the shape of {written.origin} in place with `{name}`, which a stage that does not hold"
            f" its data cannot follow. Use `{name.rstrip('_')}`, which returns the result."
        )
