"""A module in DeepSpeed's hands: what DeepSpeed is given, what it leaves on the module, and how that is taken away.

The one idea: what is there after `deepspeed.initialize` and was not before goes when a run ends, so the same module may
train again, on other ranks or none. Left out: steps (``zero/deepspeed/engine.py``).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.closed_parameters import lose
from lightning_parallel.zero.collectives import broadcast_all
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.deepspeed.checkpoints import DividedStates
from lightning_parallel.zero.deepspeed.setup import (
    DeepSpeedOptions,
    ShardGroups,
    answering_for,
    forget_groups,
    import_deepspeed,
    vectors_of,
)
from lightning_parallel.zero.deepspeed.states import cut_state, whole_state
from lightning_parallel.zero.fsdp2.engine import STEPS
from lightning_parallel.zero.module_footprints import Footprints
from lightning_parallel.zero.native.partition import WORDS
from lightning_parallel.zero.optimizer.guarded_state import GuardedState
from lightning_parallel.zero.ranks import Ranks
from lightning_parallel.zero.reducer import Waiting
from lightning_parallel.zero.same_calls import SameCalls

_LEFT_IN_STEPS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")  # attributes that DeepSpeed gives modules late


class DividedModule(DividedStates):
    """Hands a module to DeepSpeed, and takes it back.

    Args:
        module, optimizer, device, options, control, ranks: see `DeepSpeedEngine`.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, device: torch.device, options: DeepSpeedOptions,
        control: Any, ranks: Ranks,
    ) -> None:  # fmt: skip
        super().__init__(module, optimizer, options, control, ranks)
        self.device = device
        self._calls: SameCalls | None = None
        self._nesting: list[nn.TransformerEncoder] = []

    def initialize(self, local_rank: int, waiting: Waiting) -> None:
        """Let DeepSpeed divide; all ranks get the first one's parameters. Collective."""
        if self.ranks.num_replicas > 1:  # DeepSpeed gives each group the parameters of its own first rank
            broadcast_all([parameter.detach() for parameter in self.module.parameters()], None, 0)
        self._footprints = Footprints(self.module.modules())
        self._marks = {parameter: set(vars(parameter)) for parameter in self.module.parameters()}
        given = {} if self.optimizer is None else dict(self.optimizer.state.items())
        if self.optimizer is not None:
            self.optimizer.state = defaultdict(dict)
        self.deepspeed = self._initialize(local_rank)
        if self.optimizer is not None:
            self._take_given(given)
        self._footprints.noted()
        if self.options.stage == 3:
            self._calls = self._watch_calls(waiting)
            # In evaluation they nest padded rows for layers that take none where a hook hangs on them.
            encoders = (m for m in self.module.modules() if isinstance(m, nn.TransformerEncoder))
            self._nesting = [encoder for encoder in encoders if encoder.use_nested_tensor]
            for encoder in self._nesting:
                encoder.use_nested_tensor = False

    def _watch_calls(self, waiting: Waiting) -> SameCalls:
        """Compare what ranks call before DeepSpeed gathers it, and what they made gradients of before it is reduced."""
        parts = [*self.module.named_modules(), *self.module.named_parameters()]
        numbers = {part: number for number, (_, part) in enumerate(parts)}
        names = [clean_name(name) or type(self.module).__name__ for name, _ in parts]
        calls = SameCalls(names, self.control, "deepspeed", self.device.type == "cpu", waiting)

        def watched(way: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def compared(part: Any) -> Any:
                if isinstance(part, Tensor) or next(part.parameters(recurse=False), None) is not None:
                    calls.call(numbers[part], way)
                return run(part)

            return compared

        for way in ("forward", "backward"):
            name = f"pre_sub_module_{way}_function"
            setattr(self._offload, name, watched(way, getattr(self._offload, name)))
        if self.optimizer is not None:
            reduce = self.inner.reduce_ready_partitions_and_remove_grads
            self.inner.reduce_ready_partitions_and_remove_grads = watched("backward", reduce)
        return calls

    def end_calls(self) -> None:
        """A backward has ended here: ranks have called the same modules in it."""
        if self._calls is not None:
            self._calls.end()

    def _initialize(self, local_rank: int) -> Any:
        deepspeed = import_deepspeed(self.device)
        with vectors_of(self.options.updated):
            engine, *_ = deepspeed.initialize(
                args=argparse.Namespace(device_rank=local_rank),
                model=self.module,
                optimizer=self.optimizer,
                model_parameters=[p for group in self.groups for p in group] if self.groups else [],
                mpu=ShardGroups(self.ranks) if self.ranks.num_replicas > 1 else None,
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
            veil = getattr(self, "veil", None)
            with nullcontext() if veil is None else veil.lifted():
                self._offload.get_param_coordinator().reset_step()
                engine._forward_prologue(args, kwargs)
                try:
                    return step(*args, **kwargs)
                finally:
                    engine._forward_epilogue()

        setattr(self.module, name, MethodType(wrapped, self.module))

    def release(self, failed: bool = False) -> None:
        """Give the module back whole, on every rank's host, and the optimizer with its own parameters. Collective, but
        after a failure."""
        try:
            self._give_back(failed)
        except BaseException:
            if not failed:  # another rank failed while it was waited for
                self._give_back(failed=True)
            raise
        finally:
            forget_groups()

    def _give_back(self, failed: bool) -> None:
        is_lost = failed and self.options.stage == 3 and self.ranks.size > 1
        left = self._states_left()
        shapes = {n: (p, getattr(p, "ds_shape", p.shape)) for n, p in self.module.named_parameters()}
        whole, self._released = {} if is_lost else self._whole_parameters(), True
        with answering_for(self.ranks.rank) if failed else nullcontext():
            self.deepspeed.destroy()
        if is_lost:
            whole = {parameter: torch.empty(0, dtype=parameter.dtype) for parameter, _ in shapes.values()}
        for parameter, values in whole.items():
            for name in set(vars(parameter)) - self._marks[parameter]:
                delattr(parameter, name)
            parameter.data, parameter.grad = values, None
        for name, (parameter, shape) in shapes.items() if is_lost else ():
            lose(parameter, clean_name(name), shape)
        for encoder in self._nesting:
            encoder.use_nested_tensor = True
        for module in self._footprints.remove():
            module._parameters = dict(module._parameters.items())
            for name in _LEFT_IN_STEPS:
                vars(module).pop(name, None)
        if self.optimizer is not None:
            for name in ("step", "zero_grad", "add_param_group"):
                vars(self.optimizer).pop(name, None)
            self.optimizer.state = left
            for group, params in zip(self.optimizer.param_groups, self.groups, strict=True):
                group["params"] = params

    def _states_left(self) -> Any:
        """The optimizer's states behind the run: of parameters where this rank has all, else guarded."""
        if self.optimizer is None:
            return {}
        state, fragments = self.optimizer.state, self.fragments
        held = {p: state[fragment.segment] for p, fragment in fragments.items() if fragment.segment in state}
        if held and self.ranks.size > 1:
            return GuardedState({}, WORDS.format(name=type(self.optimizer).__name__))
        return defaultdict(dict, {p: whole_state(fields, fragments[p]) for p, fields in held.items()})

    def _take_given(self, given: Mapping[Any, Any]) -> None:
        """An optimizer that has stepped already, in one process, goes on from its states."""
        assert self.optimizer is not None
        self.optimizer.state.clear()
        for parameter, fragment in self.fragments.items():
            if given.get(parameter):
                self.optimizer.state[fragment.segment] = cut_state(given[parameter], fragment)

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
