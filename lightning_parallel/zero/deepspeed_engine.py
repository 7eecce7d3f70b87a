"""The engine that hands a module and its optimizer to DeepSpeed, for stages 1, 2 and 3.

The one idea: DeepSpeed divides, reduces and steps; this class decides when. Gradients are never divided by the number
of batches that accumulate (the Trainer has done that), a clip is that of the step that follows, and `optimizer.step` is
DeepSpeed's. States are spoken of in pieces of one process's, so no checkpoint knows who wrote it. Left out: several
optimizers, groups added while training runs, gradients that a hook could read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.accounting import StateBytes
from lightning_parallel.zero.collectives import broadcast_together
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.deepspeed_setup import DeepSpeedOptions, forget_groups, import_deepspeed
from lightning_parallel.zero.deepspeed_states import (
    Fragment,
    find_fragments,
    flat_vectors,
    pieces_of,
    sharded_piece,
    write_states,
)
from lightning_parallel.zero.footprints import Footprints
from lightning_parallel.zero.full_shards import STEPS
from lightning_parallel.zero.hidden_gradient import Curtain
from lightning_parallel.zero.native import MASTERS
from lightning_parallel.zero.promise import ModelStates, most_of_ranks, promise, state_sizes
from lightning_parallel.zero.state import Gather, join_pieces

Groups = list[list[nn.Parameter]]


class DeepSpeedEngine:
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
        self.module, self.device, self.options, self.control = module, device, options, control
        self.optimizer = optimizers[0] if optimizers else None
        self.groups: Groups = [list(group["params"]) for group in self.optimizer.param_groups] if self.optimizer else []
        self.broadcast_buffers = True
        self._clip, self._stepping, self._released = 0.0, False, False
        self._has_gradients = False
        self._saved: tuple[Any, Any] | None = None
        self._masters: dict[str, Any] = {}
        self._model: dict[str, dict[str, Any]] | None = None
        broadcast_together(list(module.buffers()), None, 0)
        self._footprints = Footprints(module.modules())
        self._marks = {parameter: set(vars(parameter)) for parameter in module.parameters()}
        self.deepspeed = self._initialize(local_rank)
        self._footprints.noted()
        self._curtain = Curtain(p for group in self.groups for p in group if p.requires_grad)
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
    def inner(self) -> Any:
        """DeepSpeed's optimizer."""
        return self.deepspeed.optimizer

    @property
    def group(self) -> Any:
        """The ranks among which states are divided; None are all."""
        return None

    @property
    def fragments(self) -> dict[nn.Parameter, Fragment]:
        """This rank's elements of every parameter that trains."""
        trained = [p for group in self.groups for p in group if p.requires_grad]
        return find_fragments(self.inner, trained)

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
        """`optimizer.step`: run the closure, then DeepSpeed's step, which runs the optimizer's own on its vectors."""
        if self._stepping:
            return self._own_step(**kwargs)
        with torch.enable_grad():
            result = None if closure is None else closure()
        if not self._has_gradients:  # as other optimizers do without gradients
            return result
        self._curtain.open()
        self._stepping, self.inner.clip_grad = True, self._clip
        try:
            if self.options.dtype == torch.float32:
                self.inner.refresh_fp32_params()  # a hook may have written to the parameters
            self.deepspeed.step()
        finally:
            self._stepping, self._clip, self._has_gradients = False, 0.0, False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those that were reduced."""
        self._curtain.open()
        self._has_gradients = False
        self.inner.zero_grad()
        if self.options.stage < 3:
            for reduced in (self.inner.averaged_gradients, self.inner.all_grad_tensors):
                reduced.update(dict.fromkeys(reduced))
            self.inner.micro_step_id = -1  # the next backward is the first

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a callback that unfreezes layers as training goes.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            'ZeROStrategy(engine="deepspeed") cannot add a parameter group while training runs: DeepSpeed has divided'
            ' the others already. Give configure_optimizers all parameters, or use engine="native".'
        )

    # -- states --------------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module, gather: Gather) -> dict[str, Any]:
        """The whole model's state on the gathering rank; elsewhere nothing (stage 3) or the same."""
        state = module.state_dict()
        if self.options.stage < 3 or self._released:
            return {name: _own_memory(value) for name, value in state.items()}
        parts = gather(self._sharded_pieces())
        if parts is None:
            return {}
        joined = join_pieces(parts)
        return {name: joined[name]["value"] if name in joined else _own_memory(v) for name, v in state.items()}

    def _sharded_pieces(self) -> dict[str, dict[str, Any]]:
        """Stage 3: this rank's part of every parameter, by all of its names."""
        rank, named = self.deepspeed.global_rank, self.module.named_parameters(remove_duplicate=False)
        found = {clean_name(name): sharded_piece(parameter, rank) for name, parameter in named}
        return {name: {"value": piece} for name, piece in found.items() if piece is not None}

    def model_pieces(self, module: nn.Module) -> dict[str, dict[str, Any]]:
        """This rank's pieces of the model's state, in 32 bits where the optimizer updates 32 bits."""
        if self._model is not None:
            return self._model
        ranks, rank = self.deepspeed.world_size, self.deepspeed.global_rank
        masters = self._own_masters()
        trained = {p for group in self.groups for p in group if p.requires_grad}
        copied = {clean_name(n) for n, p in module.named_parameters() if p in trained} if self._has_masters else set()
        sharded = self._sharded_pieces() if self.options.stage == 3 else {}
        names = [clean_name(n) for n, _ in module.named_parameters(remove_duplicate=False)] if sharded else []
        own = {
            name: {"value": _own_memory(value)}
            for turn, (name, value) in enumerate(module.state_dict().items())
            if name not in copied and name not in names and turn % ranks == rank
        }
        rest = {name: fields for name, fields in sharded.items() if name not in copied}
        return own | rest | {name: {"value": fields["master"]} for name, fields in masters.items()}

    @property
    def _has_masters(self) -> bool:
        return self.options.dtype != torch.float32 and self.optimizer is not None

    def _own_masters(self) -> dict[str, dict[str, Any]]:
        """This rank's part of the 32-bit copies of parameters, by the parameters' names."""
        if not self._has_masters:
            return {}
        names, fragments = {p: clean_name(n) for n, p in self.module.named_parameters()}, self.fragments
        return {names[p]: {"master": fragment.piece(fragment.flat)} for p, fragment in fragments.items()}

    def load_model_state(self, module: nn.Module, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Take over a checkpoint's weights before or behind a run, where the module is whole."""
        module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Take over 32-bit copies, by the names of their parameters."""
        if not self._has_masters:
            return
        names = {p: clean_name(n) for n, p in self.module.named_parameters()}
        for parameter, fragment in self.fragments.items():
            if names[parameter] in masters:
                fragment.write(fragment.flat, masters[names[parameter]])

    def optimizer_pieces(self, optimizer: Optimizer) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """This rank's pieces of the optimizer's state, and its groups."""
        return self._saved or (pieces_of(optimizer, self._numbered()), self._numbered_groups(optimizer))

    def _numbered(self) -> dict[int, Fragment]:
        """This rank's fragments by the number that a parameter has in one process's optimizer."""
        parameters, fragments = [p for group in self.groups for p in group], self.fragments
        return {number: fragments[p] for number, p in enumerate(parameters) if p in fragments}

    def _numbered_groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        numbers = iter(range(sum(map(len, self.groups))))
        return [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [next(numbers) for _ in params],
            }
            for group, params in zip(optimizer.param_groups, self.groups, strict=True)
        ]

    def optimizer_state(self, optimizer: Optimizer, gather: Gather) -> dict[str, Any]:
        """The whole optimizer's state on the gathering rank, nothing elsewhere."""
        mine, groups = self.optimizer_pieces(optimizer)
        parts = gather(mine)
        return {} if parts is None else {"state": join_pieces(parts), "param_groups": groups}

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole optimizer's state."""
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != [len(group) for group in self.groups]:
            raise ValueError(
                f"The checkpoint's {type(optimizer).__name__} has parameter groups of sizes {sizes}, this run's has"
                f" {[len(group) for group in self.groups]}. Resume with the optimizer that saved it."
            )
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        states = {place: state["state"][number] for place, number in enumerate(numbers) if number in state["state"]}
        write_states(optimizer, self._numbered(), states)
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            params = group["params"]
            group.clear()
            group.update({**saved, "params": params})

    def extra_state(self, gather: Gather) -> dict[str, Any]:
        """What a checkpoint needs beside weights and optimizer states."""
        if not self._has_masters:
            return {}
        parts = gather(self._masters or self._own_masters())
        if parts is None:
            return {}
        return {MASTERS: {name: fields["master"] for name, fields in join_pieces(parts).items()}}

    def model_states(self, optimizers: Sequence[Optimizer]) -> ModelStates:
        """What the paper promises this rank, and what DeepSpeed's vectors add; collective.

        DeepSpeed updates a copy of 32 bits also of parameters that have 32 bits themselves.
        """
        trained = [p for group in self.groups for p in group if p.requires_grad]
        size, ranks, stage = self.options.dtype.itemsize, self.deepspeed.world_size, self.options.stage
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
        parts = sum(flat.numel() for flat in flat_vectors(self.inner))
        states = ((flat, state) for o in optimizers for flat, state in o.state.items())
        by_element, counters = state_sizes(states)
        [by_element] = most_of_ranks([by_element], self.control)
        frozen = [p for p in self.module.parameters() if not p.requires_grad]
        divided = [p.ds_tensor if stage == 3 else p for p in frozen]  # type: ignore[attr-defined]
        return promise(
            stage, ranks, parameters, StateBytes(size, size, 4 + by_element), size,
            held={
                "parameters": parts if stage == 3 else parts * ranks,
                "gradients": parts if stage >= 2 else parameters,
                "copy": parts,
            },
            copy_bytes=4, owned=parts, counters=counters, frozen=sum(p.nbytes for p in divided),
        )  # fmt: skip

    def keep_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Before the ranks part: what may be saved afterwards."""
        if self.optimizer is not None:
            self._saved = self.optimizer_pieces(self.optimizer)
            self._masters, self._model = self._own_masters(), self.model_pieces(self.module)

    # -- the end -------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give the module back whole, on every rank's host, and the optimizer with its own parameters. Collective."""
        whole, self._released = self._whole_parameters(), True
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


def _own_memory(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
