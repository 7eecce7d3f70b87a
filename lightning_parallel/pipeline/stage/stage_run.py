"""Run the user's step as one stage: only that stage's modules compute, the rest are Phantoms.

The one idea: every unit's `__call__` is intercepted. While a `StageRun` is active, a unit

* of an earlier stage returns Phantoms shaped like what its producer made;
* of this stage runs for real; at the stage's first block the Phantoms among its arguments become the received values;
* of a later stage stops the step: its arguments are what is sent on.

The last stage runs the step to its end: the user's loss, the user's logging. Outside a run modules behave as ever.
A module may be called again while its stage lasts. Where the step calls one when its stage has ended (the whole model
twice), earlier stages go on with Phantoms of what later ones return, as often as `rounds` found out that they must.
Left out is what needs a later stage's result on an earlier one; it raises, naming module and stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline.partition.layout import Unit
from lightning_parallel.pipeline.phantoms.errors import Overwritten, PhantomError, Unread
from lightning_parallel.pipeline.phantoms.phantom import Phantom, phantoms_in
from lightning_parallel.pipeline.stage import calls
from lightning_parallel.pipeline.stage.calls import ONCE, nth
from lightning_parallel.pipeline.stage.cut import Hook
from lightning_parallel.pipeline.stage.derivatives import is_transformed, looked_at, node_of, reaches
from lightning_parallel.pipeline.stage.run_state import UnitOutputs
from lightning_parallel.pipeline.stage.stage_values import NotSent
from lightning_parallel.pipeline.stage.unit_calls import CalledAgain, StepCut, UnitCalls


class StageRun(UnitCalls):
    """One run of the user's step as one stage on one micro-batch; the arguments are `RunState`'s."""

    def forward(self, step: Callable[[], Any]) -> Any:
        """Run the step; returns its result on the last stage, None where it was cut.

        Raises:
            PhantomError: the step cannot be run in stages as it is written.
        """
        try:
            with self.cut.active_as(self), self._lending(), looked_at(self._refuse_derivative):
                result = self.realized(step())
        except StepCut:
            return None
        except Unread as error:
            if self.is_last or not self.exits:
                raise
            words = calls.NOT_INTO if isinstance(error, Overwritten) else calls.NOT_BETWEEN
            raise Unread(f"{error} {words}") from error
        self.has_ended = True
        if not self.is_last and not self.going.finding:
            self._refuse_end(result)
        if self.is_last:
            self._refuse_phantoms(result, "returns")
        return result

    def _refuse_derivative(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], adds: bool) -> None:
        """The step takes a derivative itself; inside a unit it may.

        Raises:
            PhantomError: an earlier stage ran a part of what is to be derived, or weights have been freed since; or it
                adds to gradients, which this step's own do not begin anew from.
        """
        if self._inside:
            return
        if adds:
            raise PhantomError(calls.BACKWARD_IN_STEP)
        if not self._is_divided:
            return
        if self.cut.windows is not None:
            raise PhantomError(calls.DERIVATIVE_OF_FREED)
        received = {node for x in self._stage_values.inputs.values() if (node := node_of(x)) is not None}
        is_forward_mode = not outputs
        whole = [x for x in inputs if reaches([x], received.__contains__)]
        if is_forward_mode or (len(whole) < max(1, len(inputs)) and reaches(outputs, received.__contains__)):
            raise PhantomError(calls.derivative(self.stage))

    def _refuse_end(self, result: Any) -> None:
        """The step ended on a stage that is not the last."""
        first_block = self.cut.first_block(self.stage + 1)
        raise PhantomError(
            calls.not_all_called(self.stage, first_block, self.exits, self.going, returned_none=result is None)
        )

    @contextmanager
    def replay(self) -> Iterator[None]:
        """While a backward runs: blocks recomputed by activation checkpointing find this micro-batch's inputs."""
        self._replaying, self.plain = True, False
        with self.cut.active_as(self), self._lending():
            yield

    @contextmanager
    def _lending(self) -> Iterator[None]:
        """Other stages' parameters outlive a run: what they were bound to in this one counts while it is active."""
        self.lend(True)
        try:
            yield
        finally:
            self.lend(False)

    def lend(self, binds: bool) -> None:
        """Bind other stages' parameters to what they are in this run, or let go of it."""
        for parameter, value in self._entry.lent:
            if binds:
                parameter.bind(value)
            else:
                parameter.value = None

    def call(
        self, hook: Hook, owner: nn.Module, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call of a unit does in this run; `owner` is the unit's module, `module` its own `__call__`."""
        unit = hook.unit
        if self._is_divided and not self._inside and is_transformed():
            raise PhantomError(calls.DERIVATIVE_OF_FREED if self.cut.windows is not None else calls.TRANSFORMED)
        if self._replaying:
            return self._call_again(hook, owner, module, args, kwargs)
        before_this = self.called.get(unit.name, 0)
        if before_this and not self.cut.keeps_pace(unit.name, self.called):
            return module(*args, **kwargs)  # as any operation of the step: on every stage
        if unit.stage > self.stage:
            self._reach(unit, nth(hook.name, before_this), args, kwargs)
        self.called[unit.name] = before_this + 1
        self.began[unit.name, self.cut.streams.stream] = before_this
        if unit.stage != self.stage:
            return self._phantom_result(hook, owner, args, kwargs, before_this)
        self._enter_at_first_block(unit, args, kwargs, before_this)
        args, kwargs = self._real_arguments(unit, args, kwargs)
        self._inside += 1
        try:
            if self.record is None:
                result = self._compute(hook, owner, module, args, kwargs, before_this)
            else:
                result = self._compute_and_note(hook, owner, module, args, kwargs, before_this)
        finally:
            self._inside -= 1
        if self._stage_values.keep is not None:
            self._stage_values.put_all(nth(hook.name, before_this), result)
        if self.exits:
            self._count_after_exit()
        return result

    def _count_after_exit(self) -> None:
        """One of this stage's units was called when a later stage had been: results may go by to stages further on."""
        self.after_exit += 1
        self._exit.note(())
        if self._is_over():
            raise StepCut

    def _is_over(self) -> bool:
        going = self.going
        return not going.finding and self.exits == going.exits and self.after_exit >= going.after

    def _call_again(
        self, hook: Hook, owner: nn.Module, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call in a recomputation, which may begin or end within another stage's blocks."""
        unit = hook.unit
        if unit.stage > self.stage:
            raise PhantomError(calls.runs_on(unit, self.stage))
        before_this = 0
        if self.called.get(unit.name, 0) > 1:
            try:
                before_this = self.began[unit.name, self.cut.streams.stream]
            except KeyError:
                raise PhantomError(calls.which_call(unit)) from None
        if unit.stage < self.stage:
            return self._phantom_result(hook, owner, args, kwargs, before_this)
        self._enter_at_first_block(unit, args, kwargs, before_this)
        args, kwargs = self._real_arguments(unit, args, kwargs)
        return self._compute(hook, owner, module, args, kwargs, before_this)

    def _enter_at_first_block(self, unit: Unit, args: Any, kwargs: Any, before_this: int) -> None:
        if unit.block == self._first_block and self.stage:
            finding = self.going.finding
            try:
                self._entry.enter(unit, (args, kwargs), before_this, self._replaying, finding)
            except NotSent:
                if finding:
                    raise StepCut from None
                raise

    def _real_arguments(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not phantoms_in(args) and not (kwargs and phantoms_in(kwargs)):
            return args, kwargs
        args, kwargs = self.realized((args, kwargs))
        early = self.stage > 0 and unit.block is None and not self.called.get(self.cut.block_name(self._first_block))
        remedy = calls.earlier(unit, self.stage) if early else None
        self._refuse_phantoms((args, kwargs), f"passes to `{unit.name}` (stage {self.stage})", remedy)
        return args, kwargs

    def _reach(self, unit: Unit, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module of a later stage is called: the next stage's first block, or another whose result is known."""
        layout = self.cut.layout
        if unit.stage == self.stage + 1 and unit.block == layout.bounds[self.stage + 1]:
            last_block = self.cut.block_name(layout.bounds[self.stage + 1] - 1)
            if last_block not in self.called and (self.going == ONCE or self.going.finding):
                self._doubt(calls.out_of_order(unit, last_block))
            self._leave(unit, args, kwargs)
        elif name not in self.known:
            self._doubt(calls.too_early(unit, self.stage, self.cut.first_block(self.stage + 1)))

    def _doubt(self, words: str) -> None:
        """The step calls stages out of order: wrong, unless it calls them again."""
        if not self.going.finding:
            raise CalledAgain(words)
        self.doubt = self.doubt or words

    def _leave(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stop the step, if it is over: the arguments of the next stage's first block are what is sent."""
        leaves = self._exit.values_of(tree_flatten((args, kwargs))[0])
        missing = [leaf for leaf in leaves if isinstance(leaf, Phantom)]
        if missing:
            remedy = calls.LATER if any(map(self._comes_later, missing)) else calls.THROUGH_BLOCKS
            raise PhantomError(calls.not_held(unit, self.stage, [leaf.origin for leaf in missing], remedy))
        self._exit.note(leaves if self.going == ONCE else self._exit.watched(leaves))
        self.exits, self.after_exit = self.exits + 1, 0
        if self._is_over():
            raise StepCut


__all__ = ["CalledAgain", "StageRun", "StepCut", "UnitOutputs"]
