"""How a module's calls reach the active run of a step: its class is swapped for a subclass that asks.

The one idea: a run decides at `__call__`, so that a module's own hooks see real tensors only. Almost every call is that
of a block that computes here, with plain arguments; it is decided by a handful of comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_parallel.pipeline.partition.layout import Unit
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.outside import asks_for_shapes
from lightning_parallel.pipeline.phantoms.phantom import PLAIN
from lightning_parallel.pipeline.stage.random_streams import behind, own

if TYPE_CHECKING:
    from lightning_parallel.pipeline.graphs.block_graphs import BlockGraphs
    from lightning_parallel.pipeline.stage.cut import CutModel


class Hook:
    """What an intercepted module knows: its cut, its unit, and what follows from them."""

    def __init__(self, cut: CutModel, unit: Unit, number: int, inside: Sequence[tuple[str, nn.Module]]) -> None:
        self.cut, self.unit, self.name, self.stage = cut, unit, unit.name, unit.stage
        self.begins_stage = unit.stage > 0 and unit.block == cut.layout.bounds[unit.stage]
        self.origin = f"the output of `{unit.name}` (stage {unit.stage})"
        self.left = f"{unit.name} leaves behind"  # key of its attributes among the outputs
        self.shown = f"{unit.name} shows to hooks"  # key of what hooks inside it are called with
        self.inside = inside
        self.hooks_inside = [part._forward_hooks for _, part in inside]
        self.own_stream, self.stream_behind = own(number), behind(number)
        self.graphs: BlockGraphs | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return self


class _Intercepted:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook: Hook = self.__dict__["_pipeline_hook"]
        run = hook.cut.active
        if run is None:
            try:
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
            except PhantomError as error:
                raise _explained(error, hook) from error
        if (
            not run.plain or hook.stage != run.stage or hook.begins_stage or hook.name in run.called
            or kwargs or not PLAIN.issuperset(map(type, args))
        ):  # fmt: skip
            return run.call(hook, self, super().__call__, args, kwargs)  # type: ignore[misc, arg-type]
        # Almost every call: a block of this stage with plain arguments. Written out, since it runs for every block.
        run.called[hook.name] = 1
        run.began[hook.name, hook.cut.streams.stream] = 0
        start, key = hook.cut.streams.start, run.key
        start(key ^ hook.own_stream)
        try:
            if hook.graphs is not None:
                return hook.graphs.call(super().__call__, args, kwargs)  # type: ignore[misc]
            return super().__call__(*args)  # type: ignore[misc]
        finally:
            start(key ^ hook.stream_behind)


def _explained(error: PhantomError, hook: Hook) -> PhantomError:
    """What to say of an error in a unit that no step called."""
    if asks_for_shapes():
        return error
    return PhantomError(
        f"`{hook.name}` (stage {hook.stage}) is called outside of a step, where a rank has its own stages and no other."
        " Call the model in training_step, validation_step, test_step or predict_step, in which stages hand on to each"
        " other what they made. A hook is given what the step returned (`outputs`); trainer.predict runs the model on"
        " rows of your own."
    )


_classes: dict[type, type] = {}


def intercept(module: nn.Module, hook: Hook) -> None:
    """Swap the module's class for a subclass whose `__call__` asks the active run: user hooks see real tensors only."""
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(cls.__name__, (_Intercepted, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    module.__class__ = _classes[cls]
    module.__dict__["_pipeline_hook"] = hook


def let_go(module: nn.Module) -> None:
    """Give an intercepted module its own class back."""
    if "_pipeline_hook" in module.__dict__:
        module.__class__ = type(module).__mro__[2]
        del module.__dict__["_pipeline_hook"]
