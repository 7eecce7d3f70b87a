"""Runs of the user's step whose blocks run in slices: one that notes their calls, one that takes what they gave.

The one idea: the step is the user's and runs on whole micro-batches. As the first slice comes, it runs up to where its
stage ends, and its blocks' calls are noted. The last stage runs it once more when all slices have passed, to its end:
the loss is computed from whole sequences. What its first run did to the model is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline.partition.layout import Unit
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.stage.cut import Hook
from lightning_parallel.pipeline.stage.snapshot import untouched
from lightning_parallel.pipeline.stage.stage_run import StageRun, StepCut
from lightning_parallel.pipeline.token_slices.call import BlockCall, Surroundings
from lightning_parallel.pipeline.token_slices.check import check_block, refuse_hooks


class CheckedRun(StageRun):
    """A run on whole sequences that tries every block in slices first, where nobody has done so before.

    Attributes:
        length: T, positions of the sequences.
    """

    length = 0

    def _compute_and_note(
        self, hook: Hook, owner: nn.Module, module: Any, args: Any, kwargs: Any, before_this: int
    ) -> Any:
        slices = self.cut.slices
        if slices is None or hook.unit.block is None or not torch.is_grad_enabled():
            return super()._compute_and_note(hook, owner, module, args, kwargs, before_this)
        refuse_hooks(hook, owner)
        self.length = check_block(hook, owner, module, (args, kwargs), slices, self.key, self.cut.streams, self.length)
        result = super()._compute_and_note(hook, owner, module, args, kwargs, before_this)
        assert self.record is not None
        if self.record[hook.left]:
            _, attribute = next(iter(self.record[hook.left]))
            raise PhantomError(
                f"Block `{hook.name}` leaves tensors in its attribute `{attribute}`, where each slice of a sequence"
                " would replace those of the one before. Return them, or use a schedule of whole micro-batches."
            )
        return result


class _BlocksElsewhere(StageRun):
    """Blocks of this stage do not run when the step calls them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plain = False

    def call(self, hook: Hook, owner: nn.Module, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if hook.unit.block is None or hook.stage != self.stage or self._replaying:
            return super().call(hook, owner, module, args, kwargs)
        if hook.name in self.called:
            raise PhantomError(
                f"Block `{hook.name}` is called again in one step, and a schedule of token slices calls it once."
                " Use a schedule of whole micro-batches."
            )
        self.called[hook.name] = 1
        refuse_hooks(hook, owner)
        return self._called(hook, owner, module, args, kwargs)

    def _called(self, hook: Hook, owner: nn.Module, module: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def _is_last(self, hook: Hook) -> bool:
        return hook.unit.block == self.cut.layout.bounds[self.stage + 1] - 1


class PlanRun(_BlocksElsewhere):
    """Notes the calls of this stage's blocks.

    Attributes:
        calls: in the order in which the step makes them.
        handed_on: the arguments of the next stage's first block, by position; empty on the last stage.
        ends_step: whether this is the last stage. The run ends with its last block all the same, so it is not one that
            logs (`is_last`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ends_step, self.is_last = self.is_last, False
        self.calls: list[BlockCall] = []
        self.handed_on: list[Any] = []

    def _called(self, hook: Hook, owner: nn.Module, module: Any, args: Any, kwargs: Any) -> Any:
        self.calls.append(BlockCall(hook, module, args, kwargs, Surroundings(self.cut.device)))
        if self.ends_step and self._is_last(hook):
            raise StepCut
        return self._phantom_result(hook, owner, args, kwargs, 0)

    def forward(self, step: Callable[[], Any]) -> Any:
        with untouched(self.cut.model) if self.ends_step else nullcontext():  # it runs once more
            return super().forward(step)

    def _refuse_end(self, result: Any) -> None:
        if not self.ends_step:
            super()._refuse_end(result)
        raise PhantomError(
            f"The step ended without calling every block: {len(self.calls)} of stage {self.stage}. A step must call"
            " every block, in order. To skip a batch, return 0 * its loss in place of None."
        )

    def _leave(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.handed_on, self.exits = tree_flatten((args, kwargs))[0], 1
        raise StepCut


class FinalRun(_BlocksElsewhere):
    """Gives the step what the last block returned for whole sequences, and runs it to its end.

    Args:
        joined: that.
    """

    def __init__(self, *args: Any, joined: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._joined = joined

    def _called(self, hook: Hook, owner: nn.Module, module: Any, args: Any, kwargs: Any) -> Any:
        result = self._phantom_result(hook, owner, args, kwargs, 0)
        return self._joined if self._is_last(hook) else result
