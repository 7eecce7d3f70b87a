"""The engine that hands a module and its optimizer to DeepSpeed, for stages 1, 2 and 3.

The one idea: DeepSpeed divides, reduces and steps; this class decides when. Gradients are never divided by the number
of batches that accumulate (the Trainer has done that), a clip is that of the step that follows, and `optimizer.step` is
DeepSpeed's. Left out: states and checkpoints (``deepspeed_checkpoints.py``); several optimizers, groups added while
training runs, gradients that a hook could read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.collectives import broadcast_together
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.deepspeed_checkpoints import DividedStates
from lightning_parallel.zero.deepspeed_setup import DeepSpeedOptions, forget_groups, import_deepspeed
from lightning_parallel.zero.footprints import Footprints
from lightning_parallel.zero.full_shards import STEPS
from lightning_parallel.zero.hidden_gradient import Curtain
from lightning_parallel.zero.presence import Presence


class DeepSpeedEngine(DividedStates):
    """Trains with DeepSpeed.

    Args:
        module: on its device; all ranks get the first one's parameters and buffers.
        optimizers: one, as `configure_optimizers` made it, or none where nothing trains (stage 3 is divided even then).
        device: where it computes.
        options: how.
        local_rank: this process's place on its host.
        control: a group for host tensors of all ranks.

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
    ) -> None:
        refuse_optimizers(optimizers)
        super().__init__(module, optimizers[0] if optimizers else None, options, control)
        self.device, self.broadcast_buffers = device, True
        self._clip, self._stepping = 0.0, False
        self._has_gradients = False
        broadcast_together(list(module.buffers()), None, 0)
        self._footprints = Footprints(module.modules())
        self._marks = {parameter: set(vars(parameter)) for parameter in module.parameters()}
        self.deepspeed = self._initialize(local_rank)
        self._footprints.noted()
        self._curtain = Curtain(p for group in self.groups for p in group if p.requires_grad)
        self._presence = Presence(self._curtain.parameters, self.control)
        if self.optimizer is not None:
            self._take_over(self.optimizer)

    def _initialize(self, local_rank: int) -> Any:
        deepspeed = import_deepspeed(self.device)
        engine, *_ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=local_rank),
            model=self.module,
            optimizer=self.optimizer,
            model_parameters=[p for group in self.groups for p in group] if self.groups else [],
            config=self.options.configuration(self.device),
            dist_init_required=False,
        )
        if self.options.stage == 3:
            self._offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
            for hook in (self._offload.fwd_pre_hook, engine.module_forward_pre_hook, engine.module_forward_post_hook):
                hook.remove()  # a step begins where the module's step is called, not where its forward is
            for name in STEPS:
                self._wrap(engine, name)
        return engine

    def _wrap(self, engine: Any, name: str) -> None:
        """Tell DeepSpeed where a step of the module begins and ends."""
        step = getattr(self.module, name, None)
        if step is None:
            return

        @wraps(step)
        def wrapped(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._offload.get_param_coordinator().reset_step()
            engine._forward_prologue(args, kwargs)
            try:
                return step(*args, **kwargs)
            finally:
                engine._forward_epilogue()

        setattr(self.module, name, MethodType(wrapped, self.module))

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
        return None

    # -- steps ---------------------------------------------------------------------------------------------------------

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

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward."""
        self._curtain.open()
        self.deepspeed._running_engine_backward = True  # or its hooks would take the loss for one that is divided
        self.inner.clear_backward_seen_flag()
        self.deepspeed._backward_prologue()
        try:
            yield
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

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """`optimizer.step`: run the closure, then DeepSpeed's step, which runs the optimizer's own on its vectors.

        Raises:
            ValueError: no rank made a gradient for a parameter that trains.
        """
        if self._stepping:
            return self._own_step(**kwargs)
        with torch.enable_grad():
            result = None if closure is None else closure()
        if not self._has_gradients:  # as other optimizers do without gradients
            return result
        self._refuse_missing_gradients()
        self._curtain.open()
        self._stepping, self.inner.clip_grad = True, self._clip
        try:
            if self.options.dtype == torch.float32:
                self.inner.refresh_fp32_params()  # a hook may have written to the parameters
            self.deepspeed.step()
        finally:
            self._stepping, self._clip, self._has_gradients = False, 0.0, False
        return result

    def _refuse_missing_gradients(self) -> None:
        missing = set(self._presence.missing())
        self._presence.forget()
        if missing:
            names = [clean_name(name) for name, p in self.module.named_parameters() if p in missing]
            shown = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if names[3:] else "")
            raise ValueError(
                f'ZeROStrategy(engine="deepspeed"): no rank made a gradient for {shown} in this step. One process would'
                " leave such parameters as they are; DeepSpeed's momentum and weight decay move them all the same. Use"
                ' them in every step, leave them out of configure_optimizers, or use engine="native".'
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those that were reduced."""
        self._presence.forget()
        self._curtain.open()
        self._has_gradients = False
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

    # -- the end -------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give the module back whole, on every rank's host, and the optimizer with its own parameters. Collective."""
        whole, self._released = self._whole_parameters(), True
        self._presence.remove()
        self.deepspeed.destroy()
        for parameter, values in whole.items():
            for name in set(vars(parameter)) - self._marks[parameter]:
                delattr(parameter, name)
            parameter.data, parameter.grad = values, None
        for module in self._footprints.remove():
            module._parameters = dict(module._parameters.items())
        if self.optimizer is not None:
            for name in ("step", "zero_grad", "add_param_group"):
                vars(self.optimizer).pop(name, None)
            self.optimizer.state.clear()
            for group, params in zip(self.optimizer.param_groups, self.groups, strict=True):
                group["params"] = params
        forget_groups()

    def _whole_parameters(self) -> dict[nn.Parameter, Tensor]:
        if self.options.stage < 3:
            return {p: p.data.to("cpu", copy=True) for p in self.module.parameters()}
        self._offload.partition_all_parameters()
        gathered = import_deepspeed(self.device).zero.GatheredParameters
        whole: dict[nn.Parameter, Tensor] = {}
        for parameter in self.module.parameters():
            with gathered([parameter]):
                whole[parameter] = parameter.data.to("cpu", copy=True)
        return whole


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
