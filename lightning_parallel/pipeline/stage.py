"""Run the user's step as one stage: only that stage's modules compute, the rest are Phantoms.

The one idea: every unit's `__call__` is intercepted. While a `StageRun` is active, a unit

* of an earlier stage returns Phantoms shaped like what its producer made;
* of this stage runs for real; at the stage's first block the Phantoms among its arguments become the received values;
* of a later stage stops the step: its arguments are what is sent on.

The last stage runs the step to its end: the user's loss, the user's logging. Outside a run modules behave as ever.
Left out: modules called twice in a step and values that skip a stage. They raise, naming module and stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline.leftovers import call_hooks, leave_phantoms, left_behind, tensor_attributes
from lightning_parallel.pipeline.partition import Layout, Unit
from lightning_parallel.pipeline.phantom import (
    Phantom,
    PhantomError,
    TensorMeta,
    bound,
    describe,
    phantoms_in,
    summon,
    with_values,
)
from lightning_parallel.pipeline.random_streams import RandomStreams

_LEFT = "{} leaves behind"  # key of a unit's attributes among the outputs
UnitOutputs = dict[str, Any]  # unit name -> what it returned, with TensorMeta in place of tensors


class StepCut(BaseException):
    """The step reached a module of a later stage. A BaseException: the step's own `except Exception` lets it by."""


class StageRun:
    """One run of the user's step as one stage on one micro-batch.

    Attributes:
        inputs: received values by their position among the first block's arguments.
        known: what the units of earlier stages return.
        needed: positions of the arguments that were Phantoms at the first block, in order; set when it is reached.
        outputs: leaves of the arguments of the next stage's first block; set when the step is cut there.
        record: if not None, filled with what this stage's units return.
    """

    def __init__(
        self,
        cut: Cut,
        stage: int,
        microbatch: int,
        key: int,
        inputs: Mapping[int, Tensor],
        known: UnitOutputs,
        learn: bool,
    ) -> None:
        self.cut, self.stage, self.microbatch, self.key = cut, stage, microbatch, key
        self.inputs, self.known = inputs, known
        self.record: UnitOutputs | None = {} if learn else None
        self.needed: tuple[int, ...] | None = () if stage == 0 else None
        self.outputs: list[Any] | None = None
        self._called: set[str] = set()
        self._replaying = False
        self._grad = torch.is_grad_enabled()
        self._first_block = cut.layout.bounds[stage]

    def forward(self, step: Callable[[], Any]) -> Any:
        """Run the step; returns its result on the last stage, None where it was cut.

        Raises:
            PhantomError: the step cannot be run in stages as it is written.
        """
        last = self.stage == self.cut.layout.num_stages - 1
        try:
            with self.cut.active_as(self):
                result = step()
        except StepCut:
            return None
        if not last:
            raise PhantomError(
                f"The step ended on stage {self.stage} without calling {self.cut.first_block(self.stage + 1)}, the"
                f" first block of stage {self.stage + 1}. A step must call every block, in order; use fewer stages or"
                " other blocks=."
            )
        self._refuse_phantoms(result, "returns")
        return result

    @contextmanager
    def replay(self) -> Iterator[None]:
        """While a backward runs: blocks recomputed by activation checkpointing find this micro-batch's inputs."""
        self._replaying = True
        with self.cut.active_as(self):
            yield

    def call(
        self, unit: Unit, owner: nn.Module, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call of a unit does in this run; `owner` is the unit's module, `module` its own `__call__`."""
        if self._replaying:
            return self._call_again(unit, owner, module, args, kwargs)
        if unit.name in self._called:
            if unit.name in self.cut.without_parameters:
                return module(*args, **kwargs)  # as any operation of the step: on every stage
            raise PhantomError(
                f"Module `{unit.name}` (stage {unit.stage}) is called a second time in one step. The pipeline strategy"
                " runs each module once a step: join the inputs and call it once, or train with one stage."
            )
        if unit.stage > self.stage:
            self._exit(unit, args, kwargs)
        self._called.add(unit.name)
        if unit.stage < self.stage:
            return self._phantom_result(unit, owner, args, kwargs)
        before = tensor_attributes(owner) if self.record is not None else {}
        args, kwargs = self._real_arguments(unit, args, kwargs)
        result = self._compute(unit, module, args, kwargs)
        if self.record is not None:
            self.record[unit.name] = describe(result)
            self.record[self.cut.left[unit.name]] = left_behind(owner, before)
        return result

    def _call_again(
        self, unit: Unit, owner: nn.Module, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call in a recomputation, which may begin or end within another stage's blocks."""
        if unit.stage > self.stage:
            raise PhantomError(
                f"A recomputation on stage {self.stage} runs on into `{unit.name}` of stage {unit.stage}. Leave early"
                " stop of torch.utils.checkpoint on, or checkpoint blocks one by one."
            )
        if unit.stage < self.stage:
            return self._phantom_result(unit, owner, args, kwargs)
        args, kwargs = self._real_arguments(unit, args, kwargs)
        return self._compute(unit, module, args, kwargs)

    def _compute(self, unit: Unit, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit for real, with random numbers of its own."""
        streams, number = self.cut.streams, self.cut.number[unit.name]
        streams.enter(self.key, number)
        try:
            return module(*args, **kwargs)
        finally:
            streams.leave(self.key, number)

    def _phantom_result(self, unit: Unit, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if unit.name not in self.known:
            raise PhantomError(
                f"Module `{unit.name}` belongs to stage {unit.stage}, which did not call it before stage {self.stage}"
                f" began, but the step calls it on stage {self.stage}. Register modules in the order in which they run,"
                f' or move it with stages={{"{unit.name}": {self.stage}}}.'
            )
        origin = self.cut.origins[unit.name]
        left = self.known.get(self.cut.left[unit.name])
        if left:
            leave_phantoms(owner, left, self.cut.device, origin)
        result = summon(self.known[unit.name], self.cut.device, origin)
        self.cut.streams.leave(self.key, self.cut.number[unit.name])
        hooked = owner._forward_hooks or "forward" in owner.__dict__
        return call_hooks(owner, args, kwargs, result) if hooked else result

    def _real_arguments(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if unit.block == self._first_block and self.stage:
            self._enter(unit, args, kwargs)
        if not phantoms_in(args) and not (kwargs and phantoms_in(kwargs)):
            return args, kwargs
        args, kwargs = with_values((args, kwargs))
        self._refuse_phantoms((args, kwargs), f"passes to `{unit.name}` (stage {self.stage})")
        return args, kwargs

    def _enter(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Bind the Phantoms among the first block's arguments to what the previous stage sent."""
        if self._grad and not torch.is_grad_enabled():
            raise PhantomError(
                f"Block `{unit.name}` of stage {self.stage} is called without gradients inside a training step, as"
                " reentrant activation checkpointing does. Use torch.utils.checkpoint.checkpoint(...,"
                " use_reentrant=False)."
            )
        needed: dict[int, Phantom] = {}
        for position, leaf in enumerate(tree_flatten((args, kwargs))[0]):
            if isinstance(leaf, Phantom) and leaf.value is None and all(leaf is not other for other in needed.values()):
                needed[position] = leaf
        missing = [str(leaf.origin) for position, leaf in needed.items() if position not in self.inputs]
        if missing:
            raise PhantomError(
                f"Block `{unit.name}` of stage {self.stage} needs {', '.join(missing)}, which stage {self.stage - 1}"
                " does not hold or did not send at first. Pass the value through every block between, or set"
                " dynamic_shapes=True if the block's arguments change from batch to batch."
            )
        for position, leaf in needed.items():
            leaf.value = self.inputs[position]
        if self.needed is None:
            self.needed = tuple(needed)

    def _exit(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stop the step: the arguments of the next stage's first block are what is sent."""
        layout = self.cut.layout
        if unit.stage != self.stage + 1 or unit.block != layout.bounds[self.stage + 1]:
            raise PhantomError(
                f"Stage {self.stage} reached module `{unit.name}` of stage {unit.stage} before"
                f" {self.cut.first_block(self.stage + 1)}, the first block of stage {self.stage + 1}. Register modules"
                f' in the order in which they run, or move it with stages={{"{unit.name}": {self.stage}}}.'
            )
        last_block = self.cut.block_name(layout.bounds[self.stage + 1] - 1)
        if last_block not in self._called:
            raise PhantomError(
                f"The step calls `{unit.name}` before `{last_block}`. Name the blocks in execution order with blocks=."
            )
        self.outputs = [bound(leaf) if isinstance(leaf, Phantom) else leaf for leaf in tree_flatten((args, kwargs))[0]]
        missing = [leaf.origin for leaf in self.outputs if isinstance(leaf, Phantom)]
        if missing:
            raise PhantomError(
                f"Block `{unit.name}` of stage {unit.stage} needs a value computed from {', '.join(missing)}, which"
                f" stage {self.stage} does not hold. Pass the value through every block between."
            )
        raise StepCut

    def _refuse_phantoms(self, tree: Any, doing: str) -> None:
        for leaf in phantoms_in(tree) if isinstance(tree, (Tensor, tuple)) else tree_flatten(tree)[0]:
            if isinstance(leaf, Phantom) and leaf.value is None:
                raise PhantomError(
                    f"The step {doing} a value computed from {leaf.origin}, whose data stage {self.stage} does not"
                    " hold. Pass it through the blocks (as an argument of the block where the stage begins), or choose"
                    " blocks= so that producer and reader share a stage."
                )


class Cut:
    """A model whose units are intercepted, so that a step can be run as any one stage of a layout."""

    def __init__(self, model: nn.Module, layout: Layout, device: torch.device, streams: RandomStreams) -> None:
        self.model, self.layout, self.device, self.streams = model, layout, device, streams
        self.active: StageRun | None = None
        self.origins = {unit.name: f"the output of `{unit.name}` (stage {unit.stage})" for unit in layout.units}
        self.left = {unit.name: _LEFT.format(unit.name) for unit in layout.units}
        self.without_parameters = {
            unit.name for unit in layout.units if next(model.get_submodule(unit.name).parameters(), None) is None
        }
        self._blocks = {unit.block: unit.name for unit in layout.units if unit.block is not None}
        self.number = {unit.name: i for i, unit in enumerate(layout.units)}
        self._nested = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and m.enable_nested_tensor]
        for encoder in self._nested:
            encoder.enable_nested_tensor = False  # a nested tensor can neither be sent nor be a Phantom
        for unit in layout.units:
            _intercept(model.get_submodule(unit.name), _Hook(self, unit))

    @contextmanager
    def active_as(self, run: StageRun | None) -> Iterator[None]:
        """Make a run the active one; None lets all modules run as they are."""
        before, self.active = self.active, run
        try:
            yield
        finally:
            self.active = before

    def block_name(self, block: int) -> str:
        return self._blocks[block]

    def first_block(self, stage: int) -> str:
        return f"`{self._blocks[self.layout.bounds[stage]]}`"

    def release(self) -> None:
        """Give every module its own class back."""
        for encoder in self._nested:
            encoder.enable_nested_tensor = True
        for module in self.model.modules():
            if "_pipeline_hook" in module.__dict__:
                module.__class__ = type(module).__mro__[2]
                del module.__dict__["_pipeline_hook"]


class _Hook:
    """What an intercepted module knows: its cut and its unit."""

    def __init__(self, cut: Cut, unit: Unit) -> None:
        self.cut, self.unit = cut, unit

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self


class _Intercepted:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook: _Hook = self.__dict__["_pipeline_hook"]
        run = hook.cut.active
        original = super().__call__  # type: ignore[misc]
        if run is None:
            return original(*args, **kwargs)
        return run.call(hook.unit, self, original, args, kwargs)  # type: ignore[arg-type]


_classes: dict[type, type] = {}


def _intercept(module: nn.Module, hook: _Hook) -> None:
    """Swap the module's class for a subclass whose `__call__` asks the active run: user hooks see real tensors only."""
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(cls.__name__, (_Intercepted, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    module.__class__ = _classes[cls]
    module.__dict__["_pipeline_hook"] = hook


__all__ = ["Cut", "StageRun", "StepCut", "TensorMeta", "UnitOutputs"]
