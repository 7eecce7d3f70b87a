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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from lightning_parallel.pipeline import calls
from lightning_parallel.pipeline.calls import ONCE, Going, nth
from lightning_parallel.pipeline.cut import Cut
from lightning_parallel.pipeline.entry import Entry, NotSent
from lightning_parallel.pipeline.exit import Exit
from lightning_parallel.pipeline.goods import Goods, Place
from lightning_parallel.pipeline.intercept import Hook
from lightning_parallel.pipeline.leftovers import (
    call_hooks,
    call_hooks_inside,
    hooks_inside,
    is_hooked,
    leave_phantoms,
    left_behind,
    tensor_attributes,
)
from lightning_parallel.pipeline.partition import Unit
from lightning_parallel.pipeline.phantom import (
    Leaf,
    Overwritten,
    Phantom,
    PhantomError,
    Unread,
    phantoms_in,
    version_of,
)
from lightning_parallel.pipeline.random_streams import repeated
from lightning_parallel.pipeline.values import describe, summon

UnitOutputs = dict[str, Any]  # unit name -> what it returned, with TensorMeta in place of tensors


class StepCut(BaseException):
    """The step reached a module of a later stage. A BaseException: the step's own `except Exception` lets it by."""


class CalledAgain(PhantomError):
    """The step calls a module of an earlier stage again, and that stage ended its run before."""


class StageRun:
    """One run of the user's step as one stage on one micro-batch.

    Args:
        learn: describe in `record` what this stage's units return.
        again: whether this micro-batch ran before (keeping nothing, or to learn from it).
        keep: what is sent, to the next stage or further on; None where that is all that the next stage's first block is
            called with, and nothing else.
        made_for: positions among the first block's arguments of what the stage before would only compute for this one;
            with `learn`, they are computed here, if they can be.
        going: when the run is over, and whether it only finds that out.
        inputs: received values by their position among the first block's arguments (those of its later calls counted
            on), and units' results by `Leaf`.

    Attributes:
        known: what the units of other stages return.
        exits, after_exit: how often that block was called, and how many calls of this stage's units came since.
        record: if not None, filled with what this stage's units return.
        called: how often each unit was called so far, by name.
        began: which call of a unit began with which random stream; a recomputation begins with the same.
        is_last: whether the step runs to its end.
        has_ended: whether it did.
        doubt: what is wrong with the order of calls, should it turn out to be.
        plain: whether a call only computes: nothing is to be learnt, kept for later or recomputed.
    """

    def __init__(
        self,
        cut: Cut,
        stage: int,
        microbatch: int,
        key: int,
        inputs: Mapping[Place, Tensor],
        known: UnitOutputs,
        learn: bool,
        again: bool = False,
        keep: Collection[Place] | None = None,
        going: Going = ONCE,
        made_for: Collection[int] = (),
    ) -> None:
        self.cut, self.stage, self.microbatch, self.key = cut, stage, microbatch, key
        self.is_last = stage == cut.layout.num_stages - 1
        self.known = known
        self.record: UnitOutputs | None = {} if learn else None
        self._goods = Goods(inputs, keep, learn)
        self._entry, self._exit = Entry(stage, self._goods, made_for), Exit(self._goods)
        self.called: dict[str, int] = {}
        self.began: dict[tuple[str, int], int] = {}
        self.again, self.going = again, going
        self.exits = self.after_exit = 0
        self.has_ended, self.doubt = False, ""
        self._recomputes_blocks = cut.recomputes_blocks(stage)
        sends_results = any(isinstance(place, tuple) for place in keep or ())
        self.plain = (
            not learn and not self._recomputes_blocks and not sends_results and not going.after and cut.windows is None
        )
        self._replaying = False
        self._first_block = cut.layout.bounds[stage]

    @property
    def needed(self) -> tuple[int, ...] | None:
        """Positions of the arguments that were Phantoms at the first block, in order; None before it is reached."""
        return self._entry.needed

    @property
    def wanted(self) -> tuple[Leaf, ...]:
        """What else of earlier units was needed, in order."""
        return tuple(self._goods.wanted)

    @property
    def wanted_for(self) -> Mapping[int, tuple[Leaf, ...]]:
        """What of earlier units was needed for nothing but an output, by its position (with `learn` and `keep`)."""
        return self._exit.wanted_for

    @property
    def by_position(self) -> Collection[Leaf]:
        """Units' results that are among the first block's arguments."""
        return self._entry.by_position

    @property
    def outputs(self) -> dict[Place, Any] | None:
        """What may be sent, see `Exit`; set where the next stage's first block is called."""
        return self._exit.outputs

    def drop_outputs(self) -> None:
        """They have been sent."""
        self._exit.outputs = None

    def realized(self, tree: Any) -> Any:
        """A structure with the values of its Phantoms, fetched and computed where they can be."""
        return self._goods.realized(tree)

    def forward(self, step: Callable[[], Any]) -> Any:
        """Run the step; returns its result on the last stage, None where it was cut.

        Raises:
            PhantomError: the step cannot be run in stages as it is written.
        """
        try:
            with self.cut.active_as(self), self._lending():
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
        for parameter, value in self._entry.lent:
            parameter.bind(value)
        try:
            yield
        finally:
            for parameter, _ in self._entry.lent:
                parameter.value = None

    def call(
        self, hook: Hook, owner: nn.Module, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call of a unit does in this run; `owner` is the unit's module, `module` its own `__call__`."""
        unit = hook.unit
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
        if self.record is None:
            result = self._compute(hook, owner, module, args, kwargs, before_this)
        else:
            result = self._compute_and_note(hook, owner, module, args, kwargs, before_this)
        if self._goods.keep is not None:
            self._goods.put_all(nth(hook.name, before_this), result)
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

    def _compute_and_note(
        self, hook: Hook, owner: nn.Module, module: Callable[..., Any], args: Any, kwargs: Any, before_this: int
    ) -> Any:
        """Call a unit for real, and describe to later stages what it returns, leaves behind and shows to hooks."""
        assert self.record is not None
        attributes = tensor_attributes(owner)
        with hooks_inside(hook.inside) as shown:
            result = self._compute(hook, owner, module, args, kwargs, before_this)
        self.record[nth(hook.name, before_this)] = describe(result)
        self.record[nth(hook.left, before_this)] = left_behind(owner, attributes)
        self.record[nth(hook.shown, before_this)] = shown
        return result

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

    def _compute(
        self, hook: Hook, owner: nn.Module, module: Callable[..., Any], args: Any, kwargs: Any, before_this: int
    ) -> Any:
        """Call a unit for real, its parameters whole, with random numbers of its own."""
        windows = self.cut.windows
        if windows is None or hook.unit.block is None:
            return self._compute_whole(hook, module, args, kwargs, before_this)
        with windows.at_work(hook.unit.block, again=self._replaying) as watch:
            result = self._compute_whole(hook, module, args, kwargs, before_this)
            if torch.is_grad_enabled():
                watch((result, list(tensor_attributes(owner).values())))
        return result

    def _compute_whole(self, hook: Hook, module: Callable[..., Any], args: Any, kwargs: Any, before_this: int) -> Any:
        if not self._recomputes_blocks or self._replaying or hook.unit.block is None or not torch.is_grad_enabled():
            return self._draw_and_call(hook, module, args, kwargs, before_this)
        before = _versions(args, kwargs)

        def call(*args: Any) -> Any:
            return self._draw_and_call(hook, module, args, kwargs, before_this)

        with self.cut.keep_inputs():  # of what comes by place
            result = checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)
        if _versions(args, kwargs) != before:
            raise ValueError(calls.written_by(hook.name))
        return result

    def _draw_and_call(self, hook: Hook, module: Callable[..., Any], args: Any, kwargs: Any, before_this: int) -> Any:
        key = self.key ^ repeated(before_this)
        self.cut.streams.start(key ^ hook.own_stream)
        try:
            if hook.graphs is not None:
                return hook.graphs.call(module, args, kwargs)
            return module(*args, **kwargs)
        finally:
            self.cut.streams.start(key ^ hook.stream_behind)

    def _phantom_result(self, hook: Hook, owner: nn.Module, args: Any, kwargs: Any, before_this: int) -> Any:
        name = nth(hook.name, before_this)
        if name not in self.known:
            if self.going.finding:
                raise StepCut
            if before_this or hook.stage > self.stage:
                raise CalledAgain(calls.called_again(hook.unit))
            raise PhantomError(calls.never_called(hook.unit, self.stage))
        left = self.known.get(nth(hook.left, before_this))
        if left:
            leave_phantoms(owner, left, self.cut.device, hook.origin)
        result = summon(self.known[name], self.cut.device, hook.origin, name)
        self.cut.streams.start(self.key ^ repeated(before_this) ^ hook.stream_behind)
        if any(hook.hooks_inside):
            call_hooks_inside(hook.inside, self.known.get(nth(hook.shown, before_this)), self.cut.device, hook.unit)
        return call_hooks(owner, args, kwargs, result) if is_hooked(owner) else result

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

    def refuse_written(self, places: Iterable[Place]) -> None:
        """Raise if outputs are not what they were when the next stage's first block was called."""
        place = self._goods.written(self.outputs or {}, places)
        if place is not None:
            raise PhantomError(calls.written_to(self.stage, self.cut.first_block(self.stage + 1), place))

    def _refuse_phantoms(self, tree: Any, doing: str, remedy: str | None = None) -> None:
        for leaf in phantoms_in(tree) if isinstance(tree, (Tensor, tuple)) else tree_flatten(tree)[0]:
            if isinstance(leaf, Phantom) and leaf.value is None:
                known = calls.LATER if self._comes_later(leaf) else remedy or self._remedy(leaf.origin)
                raise PhantomError(
                    f"The step {doing} a value computed from {leaf.origin}, whose data stage {self.stage} does not"
                    f" hold. {known}"
                )

    def _comes_later(self, phantom: Phantom) -> bool:
        """Whether a Phantom was computed from what a later stage returns."""
        roots = [calls.name_of(leaf.leaf[0]) for leaf in phantom.leaves or (phantom,) if leaf.leaf is not None]
        return any(unit.stage > self.stage for unit in self.cut.layout.units if unit.name in roots)

    def _remedy(self, origin: str) -> str:
        """What to do about a value that this stage lacks."""
        for unit in self.cut.layout.units:
            if unit.block is None and origin.startswith(f"parameter `{unit.name}."):
                return f"Move its module with {calls.moved(unit.name, self.stage)}."
        return calls.NEARER


def _versions(*trees: Any) -> list[int]:
    """How often each tensor among a call's arguments has been written to."""
    return [version_of(leaf) for leaf in tree_flatten(trees)[0] if isinstance(leaf, Tensor)]
