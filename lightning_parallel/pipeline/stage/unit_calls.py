"""Calls of units in a run: those that compute, and those that return Phantoms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.stand_in import version_of
from lightning_parallel.pipeline.stage import calls
from lightning_parallel.pipeline.stage.calls import nth
from lightning_parallel.pipeline.stage.cut import Hook
from lightning_parallel.pipeline.stage.random_streams import repeated
from lightning_parallel.pipeline.stage.run_state import RunState
from lightning_parallel.pipeline.stage.side_effects import (
    call_hooks,
    call_hooks_inside,
    hooks_inside,
    is_hooked,
    leave_phantoms,
    left_behind,
    tensor_attributes,
)
from lightning_parallel.pipeline.transport.tensor_meta import describe, summon


class StepCut(BaseException):
    """The step reached a module of a later stage. A BaseException: the step's own `except Exception` lets it by."""


class CalledAgain(PhantomError):
    """The step calls a module of an earlier stage again, and that stage ended its run before."""


class UnitCalls(RunState):
    """What a unit's call gives in a run, and to later stages."""

    def _compute_and_note(
        self, hook: Hook, owner: nn.Module, module: Callable[..., Any], args: Any, kwargs: Any, before_this: int
    ) -> Any:
        """Call a unit for real, and describe to later stages what it returns, leaves behind and shows to hooks."""
        assert self.record is not None
        attributes = tensor_attributes(owner)
        with hooks_inside(hook.inside, lambda: self.cut.is_active(self)) as shown:
            result = self._compute(hook, owner, module, args, kwargs, before_this)
        self.record[nth(hook.name, before_this)] = describe(result)
        self.record[nth(hook.left, before_this)] = left_behind(owner, attributes)
        self.record[nth(hook.shown, before_this)] = shown
        return result

    def _compute(
        self, hook: Hook, owner: nn.Module, module: Callable[..., Any], args: Any, kwargs: Any, before_this: int
    ) -> Any:
        """Call a unit for real, its parameters whole, with random numbers of its own."""
        windows = self.cut.windows
        if windows is None or hook.unit.block is None:
            return self._compute_whole(hook, module, args, kwargs, before_this)
        with windows.at_work(hook.unit.block, again=self._replaying) as watch:
            result = self._compute_whole(hook, module, args, kwargs, before_this)
            if self._replaying and torch.is_grad_enabled():
                watch((result, list(tensor_attributes(owner).values())))
        return result

    def _compute_whole(self, hook: Hook, module: Callable[..., Any], args: Any, kwargs: Any, before_this: int) -> Any:
        if not self._recomputes_blocks or self._replaying or hook.unit.block is None or not torch.is_grad_enabled():
            return self._draw_and_call(hook, module, args, kwargs, before_this)
        before = versions(args, kwargs)

        def call(*args: Any) -> Any:
            return self._draw_and_call(hook, module, args, kwargs, before_this)

        with self.cut.keep_inputs():  # of what comes by place
            result = checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)
        if versions(args, kwargs) != before:
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


def versions(*trees: Any) -> list[int]:
    """How often each tensor among a call's arguments has been written to."""
    return [version_of(leaf) for leaf in tree_flatten(trees)[0] if isinstance(leaf, Tensor)]
