"""The engine that hands a module and its optimizer to DeepSpeed, for stages 1, 2 and 3.

The one idea: DeepSpeed divides and reduces; this class decides when, and in what order (``order.py``).
Gradients are never divided by the number of batches that accumulate (the Trainer has done that), and within DeepSpeed's
step the user's optimizer steps as in one process (``update.py``). Left out: states and checkpoints
(``checkpoints.py``); several optimizers, groups added while training runs, gradients that a hook could read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.pipeline.stage.derivatives import RUNS_IT, looked_at
from lightning_parallel.zero.collectives import broadcast_together
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.deepspeed.hidden_gradient import Curtain
from lightning_parallel.zero.deepspeed.module import DividedModule
from lightning_parallel.zero.deepspeed.order import Handover
from lightning_parallel.zero.deepspeed.presence import Presence
from lightning_parallel.zero.deepspeed.scale import HeldScale, held_gradients
from lightning_parallel.zero.deepspeed.setup import DeepSpeedOptions
from lightning_parallel.zero.deepspeed.update import FragmentUpdate, replace_norms
from lightning_parallel.zero.deepspeed.veil import Veil, behind_veil
from lightning_parallel.zero.optimizer.state_shapes import refuse_states
from lightning_parallel.zero.ranks import Ranks
from lightning_parallel.zero.reducer import Waiting
from lightning_parallel.zero.round_agreement import some_end


class DeepSpeedEngine(DividedModule):
    """Trains with DeepSpeed.

    Args:
        module: on its device; all ranks get the first one's parameters and buffers.
        optimizers: one, as `configure_optimizers` made it, or none where nothing trains (stage 3 is divided even then).
        device: where it computes.
        options: how.
        local_rank: this process's place on its host.
        control: a group for host tensors of all ranks.
        ranks: among whom states are divided, and who holds the same parts elsewhere.
        waiting: a context entered while this process is blocked.

    Raises:
        ValueError: there are several optimizers, or one that DeepSpeed cannot divide.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        options: DeepSpeedOptions,
        local_rank: int = 0,
        control: Any = None,
        waiting: Waiting = lambda what: nullcontext(),
        ranks: Ranks | None = None,
    ) -> None:
        refuse_optimizers(optimizers)
        refuse_parameters(module)
        ranks = ranks or Ranks(dist.get_rank(), dist.get_world_size())
        super().__init__(module, optimizers[0] if optimizers else None, device, options, control, ranks)
        self.broadcast_buffers, self._waiting = True, waiting
        self._clip, self._has_gradients = 0.0, False
        self._unscale: Tensor | None = None
        self._update: FragmentUpdate | None = None  # while DeepSpeed steps
        broadcast_together(list(module.buffers()), None, 0)
        self.initialize(local_rank, waiting)
        empty = [(clean_name(n), p) for n, p in module.named_parameters()] if options.stage == 3 else []
        self.veil = Veil(empty, self.optimizer)
        self._curtain = Curtain(p for group in self.groups for p in group if p.requires_grad)
        self._presence = Presence(self._curtain.parameters, control, waiting)
        if self.optimizer is not None:
            self._take_over(self.optimizer)
            self._handover = self._ordered(waiting) if options.stage == 2 else None
            replace_norms(self.inner, options.stage, self._measured)
        self.veil.draw()

    def _ordered(self, waiting: Waiting) -> Handover:
        """DeepSpeed's own hooks hand gradients over as they come; here they go through an order."""
        process, numbers = self.inner.process_gradients, {p: i for i, group in enumerate(self.groups) for p in group}
        trained = [p for p in reversed(numbers) if p.requires_grad]
        handover = Handover(trained, lambda p: process(p, numbers[p]), self.control, waiting)
        self.inner.process_gradients = lambda parameter, group: handover.made(parameter)
        return handover

    def _measured(self) -> Tensor:
        """Where DeepSpeed asks for the norm of gradients it gets 1; `FragmentUpdate` has the norm."""
        assert self._update is not None
        self._update.measure(self.inner, self.device, self.options.bucket_bytes)
        return torch.ones((), device=self.device)

    def _take_over(self, optimizer: Optimizer) -> None:
        """The optimizer's own methods become DeepSpeed's; its groups hold DeepSpeed's vectors from now on."""
        self._own_step = optimizer.step
        step = MethodType(lambda _, *args, **kwargs: self.step(*args, **kwargs), optimizer)
        vars(step.__func__).update(getattr(self._own_step, "__dict__", {}))  # a scheduler leaves marks on it
        optimizer.step = step  # type: ignore[method-assign]
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]

    @property
    def group(self) -> Any:
        """The ranks among which states are divided; None are all."""
        return self.ranks.group

    @property
    def replicas(self) -> Any:
        """The ranks that own the same parts elsewhere; None if there are none."""
        return self.ranks.replicas

    # -- steps ---------------------------------------------------------------------------------------------------------

    def looking_at_steps(self) -> AbstractContextManager[None]:
        """Around a step: in stage 3 derivatives that it takes itself are refused, since weights have been freed."""
        return nullcontext() if self.options.stage < 3 else looked_at(self._refuse_derivative)

    def _refuse_derivative(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], adds: bool) -> None:
        if not self.deepspeed._running_engine_backward:
            raise ValueError(
                "The step takes a derivative (torch.autograd.grad, backward, torch.func), and DeepSpeed's stage 3 has"
                f" freed weights that it needs behind their forward. {RUNS_IT}"
            )

    def begin_step(self) -> None:
        """Before a training step.

        Raises:
            ValueError: a parameter was frozen or unfrozen since DeepSpeed divided it.
        """
        trains = {id(p) for group in self.groups for p in group if p.requires_grad}
        if trains != {id(p) for p in self._curtain.parameters}:
            raise ValueError(
                'ZeROStrategy(engine="deepspeed"): parameters were frozen or unfrozen while training runs, and'
                ' DeepSpeed goes on with those of the start. Decide in configure_optimizers, or use engine="native".'
            )
        if self.broadcast_buffers:
            broadcast_together(list(self.module.buffers()), None, 0)
        self.inner.clear_backward_seen_flag()

    def begin_evaluation(self) -> None:
        """Before the first batch of an evaluation, and where training ends."""
        broadcast_together(list(self.module.buffers()), None, 0)

    def gathered_anew(self) -> list[Tensor]:
        """Weights that a backward does not have from its forward, and that hooks may write to: none; others raise."""
        return []

    def after_evaluation_step(self, is_last: bool) -> None:
        """Stage 3 gathers in every step, so all ranks need as many batches. Collective.

        Args:
            is_last: whether this rank has no other batch.

        Raises:
            ValueError: some have come to their last batch, and others have not.
        """
        if self.options.stage == 3 and some_end(is_last, self.control, self._waiting):
            raise ValueError(
                "Some ranks have come to their last batch of an evaluation or prediction and others have not, and"
                " DeepSpeed's stage 3 gathers parameters from all of them in every step. Give every rank as many"
                ' batches, or use ZeROStrategy(stage=3, engine="fsdp2"), whose ranks may differ.'
            )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward."""
        with self.veil.lifted():
            yield from self._backward()

    def _backward(self) -> Iterator[None]:
        self._curtain.open()
        self.deepspeed._running_engine_backward = True  # or its hooks would take the loss for one that is divided
        self.inner.clear_backward_seen_flag()
        self.deepspeed._backward_prologue()
        try:
            yield
            self.end_calls()
            if self._handover is not None:
                self._handover.finish()
            self.deepspeed._backward_epilogue()
        finally:
            self.deepspeed._running_engine_backward = False
        self._has_gradients = True
        self._curtain.draw()

    def accumulating(self) -> AbstractContextManager[None]:
        """Around batches after which no optimizer steps; stage 1 reduces in the step alone."""
        return nullcontext()

    def clip(self, parameters: Sequence[Tensor], value: float) -> None:
        """Scale the gradients of the step that follows to a norm of at most `value`, over all parameters."""
        self._clip = value

    def held_gradients(self) -> list[Tensor]:
        """Where this rank's gradients lie in memory now; in stage 3 the bucket stays too."""
        buckets = self.inner.ipg_buckets.values() if self.options.stage == 3 else ()
        return [*self._gradients(), *(bucket.buffer for bucket in buckets if self._has_gradients)]

    def _gradients(self) -> list[Tensor]:
        self._curtain.open()
        held = held_gradients(self.inner, self.options.stage, self.options.offload) if self._has_gradients else []
        if self._has_gradients:
            self._curtain.draw()
        return held

    def scale_by(self, scaler: Any) -> HeldScale:
        """Let a `GradScaler` ask this engine for what it would read of gradients."""

        def tell(factor: Tensor) -> None:
            self._unscale = factor

        return HeldScale(scaler, self._gradients, tell, self.device)

    @behind_veil
    def _step(self, **kwargs: Any) -> None:
        self._curtain.open()
        self._agree_on_gradients()
        self._update = FragmentUpdate(self.fragments, self._presence.anywhere, self.ranks, self._clip, self._unscale)
        try:
            self._take_over_writes()
            self.deepspeed.step()
        finally:
            self._update, self._clip, self._unscale, self._has_gradients = None, 0.0, None, False
            self._presence.forget()
        assert self.optimizer is not None
        states = self.optimizer.state
        held = [(f.segment, states[f.segment]) for f in self.fragments.values() if f.segment in states]
        refuse_states(self.optimizer, held, 'ZeROStrategy(engine="deepspeed")')

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """`optimizer.step`: run the closure, then DeepSpeed's step, which runs the optimizer's own on its vectors.

        Raises:
            ValueError: a backward ran that this library did not see.
        """
        assert self.optimizer is not None
        if self._update is not None:
            return self._update.step(self.optimizer, self._own_step, **kwargs)
        with torch.enable_grad():
            result = None if closure is None else closure()
        if not self._has_gradients:  # as other optimizers do without gradients
            self._refuse_unseen()
            return result
        self._step()
        return result

    def _take_over_writes(self) -> None:
        """Hooks may have written to whole parameters, in stage 3 small ones: the vectors to update go on from there."""
        stage = self.options.stage
        if stage < 3:
            self._rebind()
        if stage < 3 and self.options.dtype == self.options.updated:
            self.inner.refresh_fp32_params()
            return
        for parameter, fragment in self.fragments.items():
            if parameter.numel() < fragment.shape.numel():
                continue  # an empty one, which the veil has kept from being written to
            wide = fragment.of(fragment.flat)
            seen = parameter.detach().reshape(-1)[fragment.begin : fragment.begin + fragment.numel].to(wide.device)
            wide.copy_(torch.where(seen == wide.to(seen.dtype), wide, seen.to(wide.dtype)))

    @torch.no_grad()
    def _rebind(self) -> None:
        """Parameters that a hook gave other memory (`w.data = ...`) lie in DeepSpeed's vectors again."""
        inner = self.inner
        for flat, parameters in zip(inner.bit16_groups_flat, inner.round_robin_bit16_groups, strict=True):
            for parameter, view in zip(parameters, inner.unflatten(flat, parameters), strict=True):
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter)
                    parameter.data = view

    def _agree_on_gradients(self) -> None:
        """Stage 1 reduces what it has now: all ranks have the same gradients, zeros for what another has made."""
        self._presence.agree()
        for parameter in self._presence.anywhere - self._presence.seen if self.options.stage == 1 else ():
            parameter.grad = torch.zeros_like(parameter)
            if self.inner.use_grad_accum_attribute:
                self.inner._fill_param_grad_accum_attribute(parameter)

    def _refuse_unseen(self) -> None:
        if self._presence.seen:
            raise ValueError(
                'ZeROStrategy(engine="deepspeed"): loss.backward() made gradients, and DeepSpeed has not reduced them.'
                " Call self.manual_backward(loss)."
            )

    @behind_veil
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those that were reduced."""
        self._presence.forget()
        self._curtain.open()
        self._has_gradients, self._unscale = False, None
        self.inner.zero_grad()
        if self.options.stage < 3:
            for reduced in (self.inner.averaged_gradients, self.inner.all_grad_tensors):
                reduced.update(dict.fromkeys(reduced))
            self.inner.micro_step_id = -1  # the next backward is the first
        else:  # a parameter whose first gradient comes in a later backward would add it to the last step's
            self.inner.grad_partitions_flat_buffer.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a callback that unfreezes layers as training goes.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            'ZeROStrategy(engine="deepspeed") cannot add a parameter group while training runs: DeepSpeed has divided'
            ' the others already. Give configure_optimizers all parameters, or use engine="native".'
        )

    def release(self, failed: bool = False) -> None:
        """Give the module back whole, on every rank's host, and the optimizer with its own parameters. Collective;
        after a failure nobody is asked, and parameters of which others have a part raise when they are read."""
        self.veil.remove()
        self._presence.remove()
        self._curtain.open()
        super().release(failed)


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise for what DeepSpeed divides otherwise than asked for.

    Raises:
        ValueError: several optimizers, Adagrad, or a group in which nothing trains.
    """
    if len(optimizers) > 1:
        raise ValueError(
            f'ZeROStrategy(engine="deepspeed") got {len(optimizers)} optimizers, and DeepSpeed divides the states of'
            ' one. Use engine="native" or "fsdp2", or one optimizer with several groups.'
        )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Adagrad):
            raise ValueError(
                'ZeROStrategy(engine="deepspeed") got Adagrad, in whose place DeepSpeed makes another with one group.'
                ' Use engine="native" or "fsdp2", or another optimizer.'
            )
        idle = [i for i, g in enumerate(optimizer.param_groups) if not any(p.requires_grad for p in g["params"])]
        if idle:
            raise ValueError(
                f'ZeROStrategy(engine="deepspeed"): nothing in group {idle[0]} of {type(optimizer).__name__} requires a'
                " gradient, and DeepSpeed divides every group. Leave frozen parameters out of configure_optimizers."
            )


def refuse_parameters(module: nn.Module) -> None:
    """Raise for parameters that DeepSpeed cannot send or divide.

    Raises:
        ValueError: one has no dimension, or its gradients are sparse.
    """
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise ValueError(
                f'ZeROStrategy(engine="deepspeed"): parameter `{name}` has no dimension, and DeepSpeed sends bytes of'
                ' parameters that have. Make it one of shape [1] (torch.ones(1)), or use engine="native".'
            )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise ValueError(
                f'ZeROStrategy(engine="deepspeed"): the gradients of `{name}` are sparse, which DeepSpeed does not'
                " divide. Use sparse=False."
            )
