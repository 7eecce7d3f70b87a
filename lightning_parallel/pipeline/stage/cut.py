"""A model cut into stages: its units intercepted, so that a step can be run as any one of them.

The one idea: a module's class is swapped for a subclass whose `__call__` asks the active run of a step, so that a
module's own hooks see real tensors only. Almost every call is that of a block that computes here, with plain arguments;
it is decided by a handful of comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.graphs import BlockGraphs, SharedGraphs
from lightning_parallel.pipeline.partition.layout import StageLayout, Unit
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.outside import asks_for_shapes
from lightning_parallel.pipeline.phantoms.phantom import PLAIN
from lightning_parallel.pipeline.stage.calls import StopRule
from lightning_parallel.pipeline.stage.random_streams import RandomStreams, behind, own
from lightning_parallel.pipeline.stage.stage_values import Place

if TYPE_CHECKING:
    from lightning_parallel.pipeline.token_slices.lengths import Slices
    from lightning_parallel.zero.gather.parameter_gather import ParameterGather


Recompute = Literal["none", "block", "stage"]


class ActiveRun(Protocol):
    """The run of a step that is active in a cut, as whoever does not make runs sees it; see `StageRun`."""

    cut: CutModel
    stage: int
    microbatch: int
    key: int
    known: dict[str, Any]
    again: bool
    going: StopRule
    plain: bool
    is_last: bool
    called: dict[str, int]
    began: dict[tuple[str, int], int]

    @property
    def inputs(self) -> Mapping[Place, Tensor]: ...

    def realized(self, tree: Any) -> Any: ...

    def lend(self, binds: bool) -> None: ...

    def call(
        self, hook: Hook, owner: nn.Module, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class CutModel:
    """A model whose units are intercepted, so that a step can be run as any one stage of a layout.

    Args:
        model, layout, device, streams: what is cut, how, and where and with which random numbers it computes.
        recompute: what the backward computes again: nothing, each block, or the stage as a whole (on the last stage,
            whose run makes the loss and all that the step logs, each block).
        graphs: launch blocks as CUDA graphs, or None.
        keep_inputs: makes a context in which the inputs of blocks that are computed again are saved for that.
        skips: gradients of any block's arguments may leave the rank, not only of the first one's.
        slices: into what sequences are cut, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: StageLayout,
        device: torch.device,
        streams: RandomStreams,
        recompute: Recompute = "none",
        graphs: SharedGraphs | None = None,
        keep_inputs: Callable[[], AbstractContextManager[Any]] = nullcontext,
        skips: bool = False,
        slices: Slices | None = None,
    ) -> None:
        self.slices = slices
        self.model, self.layout, self.device, self.streams = model, layout, device, streams
        self._recompute, self.graphs, self.keep_inputs = recompute, graphs, keep_inputs
        self.active: ActiveRun | None = None
        self.windows: ParameterGather | None = None  # what makes blocks whole for their calls, where copies divide them
        self._blocks = {unit.block: unit.name for unit in layout.units if unit.block is not None}
        chain = [self._blocks[block] for block in sorted(self._blocks)]
        self._pace = _pace(chain, {x for x in chain if next(model.get_submodule(x).parameters(), None) is not None})
        self._nested = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
        for encoder in self._nested:
            encoder.use_nested_tensor = False  # a nested tensor can neither be sent nor be a Phantom
        for number, unit in enumerate(layout.units):
            module = model.get_submodule(unit.name)
            inside = tuple((name, part) for name, part in module.named_modules() if part is not module)
            hook = Hook(self, unit, number, inside)
            if graphs is not None and unit.block is not None:
                hook.graphs = BlockGraphs(unit.name, module, graphs, skips or hook.begins_stage)
            intercept(module, hook)

    @property
    def recomputes(self) -> bool:
        """Whether forwards run more than once."""
        return self._recompute != "none"

    def recomputes_blocks(self, stage: int) -> bool:
        """Whether a stage's backward computes each block again."""
        return self._recompute == "block" or (self._recompute == "stage" and stage == self.layout.num_stages - 1)

    def recomputes_stage(self, stage: int) -> bool:
        """Whether a stage's backward runs its forward again."""
        return self._recompute == "stage" and stage < self.layout.num_stages - 1

    @contextmanager
    def active_as(self, run: ActiveRun | None) -> Iterator[None]:
        """Make a run the active one; None lets all modules run as they are."""
        before, self.active = self.active, run
        try:
            yield
        finally:
            self.active = before

    def is_active(self, run: object) -> bool:
        return self.active is run

    def switch_to(self, run: ActiveRun | None) -> None:
        """Make another run the active one, in the middle of both."""
        for of, binds in ((self.active, False), (run, True)):
            if of is not None:
                of.lend(binds)
        self.active = run

    def keeps_pace(self, name: str, called: Mapping[str, int]) -> bool:
        """Whether a further call of a unit goes with a further pass through the chain (`called`: the calls so far).

        One without parameters may also be a function that the step uses where it likes: an activation at several places
        of the chain. It belongs to a pass if the last block with parameters before it (or else the next one) has been
        called for that pass.
        """
        if name not in self._pace:
            return True
        leader, ahead = self._pace[name]
        return called.get(leader, 0) >= called[name] + ahead

    def block_name(self, block: int) -> str:
        return self._blocks[block]

    def first_block(self, stage: int) -> str:
        return f"`{self._blocks[self.layout.bounds[stage]]}`"

    def release(self) -> None:
        """Give every module its own class back."""
        for encoder in self._nested:
            encoder.use_nested_tensor = True
        for module in self.model.modules():
            let_go(module)


def _pace(chain: Sequence[str], with_parameters: Collection[str]) -> dict[str, tuple[str, int]]:
    """For blocks without parameters: which block sets their pace, and how many calls it is ahead."""
    pace: dict[str, tuple[str, int]] = {}
    for place, name in enumerate(chain):
        before = next((other for other in reversed(chain[:place]) if other in with_parameters), None)
        after = next((other for other in chain[place:] if other in with_parameters), "")
        if name not in with_parameters:
            pace[name] = (after, 0) if before is None else (before, 1)
    return pace


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
