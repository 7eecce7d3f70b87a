"""What becomes of the gradients that a pipeline's schedule made: handed over, summed, averaged, clipped.

The one idea: Lightning zeroes gradients between the forward and `backward`, so `backward` is where those that the step
set aside are added to `p.grad`, once they are whole: summed over the stages that share a parameter, averaged over the
copies of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.pipeline.gradients.early_sums import Round
from lightning_parallel.pipeline.parameters.table import total_norm
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.strategies.pipeline_schedules import PipelineSchedules
from lightning_parallel.zero.gather.parameter_gather import ParameterGather
from lightning_parallel.zero.sharded_gradient import add_to_reduce, local_part


class PipelineGradients(PipelineSchedules):
    """The part of a pipeline strategy that delivers gradients."""

    early_sums = True  # whether sums over the copies of the model begin while backwards run
    windows: ParameterGather | None = None  # makes parameters whole for actions, where copies divide them
    _accumulating = False

    def _will_be_zeroed(self) -> bool:
        """Whether Lightning zeroes the gradients between this batch's `training_step` and its `backward`."""
        module = self.lightning_module
        assert module is not None
        batch_idx = module.trainer.fit_loop.epoch_loop.batch_idx
        first_of_window = batch_idx % module.trainer.accumulate_grad_batches == 0
        return first_of_window and not is_overridden("optimizer_zero_grad", module)

    def sums_while_running(
        self, schedule: Schedule, is_settled: bool
    ) -> tuple[Round | None, Callable[[int], None] | None]:
        """What begins sums of gradients while a training step's backwards run: over the copies of the model where the
        optimizer steps after it, or over the replicas of a stage; and what is called after each action.

        Copies add up at the end of a first step, which might begin anew on one copy alone (then it is not settled).
        """
        sums, module = self.pipeline.sums, self.lightning_module
        assert module is not None
        if sums is None:
            return None, None
        at_the_end = not is_settled or self._accumulating or is_overridden("optimizer_zero_grad", module)
        early = sums.begin(schedule, over_copies=not at_the_end)
        return early, None if early is None else early.after

    def _deliver(self) -> None:
        """Add what the step made to `p.grad`, summed over the ranks that share a parameter, and over copies."""
        fresh = self.pipeline.gradients.take()
        with torch._C.DisableTorchFunctionSubclass():
            for stand_in in self.pipeline.foreign:
                stand_in.has_gradient = stand_in.requires_grad
        if self.pipeline.take_means(fresh):
            return
        names = {entry.name: fresh.get(parameter) for entry, parameter in self.pipeline.own}
        self.pipeline.sum_shared(names)
        self._add(names)
        self._join_copies()

    def _add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Add gradients, by first name, to `p.grad`."""
        into: list[Tensor] = []
        added: list[Tensor] = []
        for entry, parameter in self.pipeline.own:
            gradient, before = gradients[entry.name], parameter.grad
            if gradient is None:
                continue
            if before is None:
                parameter.grad = gradient
            elif type(before) is not Tensor:  # divided among ranks: what is added waits there
                add_to_reduce(before, gradient)
            else:
                into.append(before)
                added.append(gradient)
        if into:
            torch._foreach_add_(into, added)

    def _join_copies(self) -> None:
        """`grad` is whole on this copy of the model: average it over the copies, where the optimizer is to use it."""
        if not self._accumulating:
            self.pipeline.data.average(self._trainable())
            if self.pipeline.data.size > 2:  # two summands give one sum, in whatever bucket
                self.pipeline.equalize_shared_gradients()

    def _pause(self) -> None:
        """Where an epoch or an evaluation begins or training ends: all copies have to be there."""
        self.pipeline.data.pause(self._trainable())

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.pipeline.own if parameter.requires_grad]

    @contextmanager
    def block_backward_sync(self) -> Any:
        """Around batches whose gradients accumulate: copies average only what the optimizer is about to use."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm over all stages, each parameter counted once."""
        parameters = {id(p) for p in self.precision_plugin.main_params(optimizer) if p.grad is not None}
        own = [(entry, p) for entry, p in self.pipeline.own if id(p) in parameters]
        counted = [
            p.grad
            for entry, p in own
            if entry.is_counted_on(self.row) and self.tensor.counts(entry.name) and p.grad is not None
        ]
        norm = total_norm(list(map(local_part, counted)), self.root_device, self._sum_over_parts)
        scale = (clip_val / (norm + 1e-6)).clamp(max=1.0)
        gradients = [p.grad for _, p in own if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, scale)

    def _sum_over_parts(self, value: Tensor) -> None:
        """Sum over the ranks that hold different parts of one model, in place."""
        self.pipeline.all_reduce_over_mates(value)
