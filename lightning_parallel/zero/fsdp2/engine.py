"""The engine of stage 3, and of stage 2 if asked for, on PyTorch's FSDP2.

The one idea: FSDP2 divides parameters, gradients and so optimizer states, gathers a block before it computes and
reduces its gradients behind it. This class decides what it is given, and speaks of states in pieces of one process's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_parallel.pipeline.stage.derivatives import RUNS_IT, is_transformed, looked_at, reaches
from lightning_parallel.zero.collectives import broadcast_all, broadcast_together
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.fsdp2.gradients import ShardGradients
from lightning_parallel.zero.fsdp2.sharding import Sharding
from lightning_parallel.zero.fsdp2.shards import called, find_blocks, groups_of, keep_dtype, local_of
from lightning_parallel.zero.fsdp2.states import ShardOptions, ShardStates, cut_state, give_whole
from lightning_parallel.zero.fsdp2.whole_scalars import WholeScalars
from lightning_parallel.zero.fsdp2.writes import ShardedData, take_over_gathered
from lightning_parallel.zero.norms import joined_norm
from lightning_parallel.zero.reducer import Waiting
from lightning_parallel.zero.round_agreement import some_end

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ShardedEngine(ShardStates):
    """Shards a module and answers for its states.

    Args:
        module: alike on all ranks or about to be made so; on the host or the device.
        mesh: the ranks, one axis; or two, "replicas" and "shards": every line along "shards" divides the module for
            itself, and gradients are averaged between lines part by part.
        device: where it computes.
        options: how.
        control: a group for host tensors.
        copies: other modules of the same structure that are sharded alike.
        waiting: a context entered while this process is blocked.

    Raises:
        ValueError: `whole_module` is False, and a parameter lies outside of all modules that are called.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        options: ShardOptions,
        control: Any = None,
        copies: Sequence[nn.Module] = (),
        waiting: Waiting = lambda what: nullcontext(),
    ) -> None:
        super().__init__(module, mesh, options, control)
        self.device, self.broadcast_buffers, self._looked_for_hooks = device, True, False
        self._optimizers: list[Optimizer] = []
        before = dict(module.named_parameters())
        self._shardings = [self._shard(m) for m in (module, *copies)]
        after = dict(module.named_parameters())
        self._sharded_from: Any = WeakIdKeyDictionary({p: after[name] for name, p in before.items()})
        del before
        names = {part: clean_name(name) or type(module).__name__ for name, part in module.named_modules()}
        parts = self._shardings[0].parts
        named = [names[cast(nn.Module, part)] for part in parts]
        self._gradients = ShardGradients(parts, named, control, device.type == "cpu", waiting)
        self._in_backward, self._waiting = False, waiting
        self._meshes: list[tuple[Any, Any]] = []
        self._scalars, self._data = WholeScalars(waiting), ShardedData(p for p in after.values())

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """These optimizers update shards: also one that was made of the parameters that were there before."""
        self._optimizers = list(optimizers)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._sharded_from.get(p, p) for p in group["params"]]
            states = {p: optimizer.state.pop(p) for p in list(optimizer.state) if p in self._sharded_from}
            for before, state in states.items():
                parameter = self._sharded_from[before]
                optimizer.state[parameter] = cut_state(parameter, state)

    @property
    def group(self) -> Any:
        """The ranks among which parameters are divided."""
        return self.shards.get_group()

    @property
    def replicas(self) -> Any:
        """The ranks that hold the same shards elsewhere; None if there are none."""
        return None if self.shards is self.mesh else self.mesh.get_group("replicas")

    def _shard(self, module: nn.Module) -> Sharding:
        options, cuda = self.options, self.device.type == "cuda"
        _refuse_hooks(module)
        _refuse_scalars(module)
        broadcast_all([p.detach() for p in module.parameters() if not p.is_meta], None, 0)
        broadcast_together([b for b in module.buffers() if not b.is_meta], None, 0)
        if options.master:
            keep_dtype(module, torch.float32)
        roots = [module] if options.whole_module else list(called(module.children()))
        sharding = Sharding(
            module,
            find_blocks(module, options.blocks),
            roots,
            methods=[name for name in STEPS if hasattr(module, name)],
            prefetch=options.prefetch if cuda else "none",
            of_roots={"reshard_after_forward": options.stage == 3 and not options.keep_root},
            mesh=self.mesh,
            reshard_after_forward=options.stage == 3,
            mp_policy=MixedPrecisionPolicy(param_dtype=options.compute),
            offload_policy=CPUOffloadPolicy(pin_memory=cuda) if options.offload else OffloadPolicy(),
        )
        left = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
        if left:
            raise ValueError(
                f'engine="fsdp2" with manual optimization gathers the parameters of a module when it is called, and'
                f" `{left[0]}` belongs to no module of {type(module).__name__} that is. Put it into a module with a"
                ' forward, or use ZeROStrategy(stage=2, engine="native").'
            )
        return sharding

    # -- steps ---------------------------------------------------------------------------------------------------------

    def looking_at_steps(self) -> AbstractContextManager[None]:
        """Around a step: derivatives that it takes itself are refused, since FSDP2 frees weights behind a forward."""
        return looked_at(self._refuse_derivative)

    def _refuse_derivative(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], adds: bool) -> None:
        if self._in_backward or (adds and not self.options.whole_module):
            return  # in steps that run backwards themselves `loss.backward()` is theirs
        if is_transformed() or not outputs or reaches(outputs, self._is_of_shards):
            raise ValueError(
                'The step takes a derivative (torch.autograd.grad, backward, torch.func), and engine="fsdp2" has freed'
                f" weights that it needs behind their forward. {RUNS_IT}"
            )

    def _is_of_shards(self, node: Any) -> bool:
        gathered = getattr(node, "variable", None)
        return "RegisterPostBackward" in node.name() or (gathered is not None and id(gathered) in self._gathered())

    def _gathered(self) -> set[int]:
        groups = [group for part in self._shardings[0].parts for group in groups_of(part)]
        held = [getattr(p, "_unsharded_param", None) for group in groups for p in group.fsdp_params]
        return {id(parameter) for parameter in held if parameter is not None}

    def begin_step(self) -> None:
        """Before a training step.

        Raises:
            ValueError: a parameter was replaced by another since it was divided.
        """
        self._refuse_replaced()
        if not self._looked_for_hooks:
            _refuse_hooks(self.module)
            self._looked_for_hooks = True
        if self.broadcast_buffers:
            broadcast_together(list(self.module.buffers()), None, 0)

    def _refuse_replaced(self) -> None:
        """A parameter that a hook puts into a module in the place of one would be overwritten by the next gathering."""
        for held in (held for part in self._shardings[0].parts for g in groups_of(part) for held in g.fsdp_params):
            info = held._module_info
            known = (getattr(held, name, None) for name in ("sharded_param", "_unsharded_param"))
            current = info.module._parameters.get(info.param_name)
            if current is not None and all(current is not p for p in known) and held.sharded_state.name != _BETWEEN:
                raise ValueError(
                    f"A hook has put another parameter in the place of `{info.param_name}` of a"
                    f' {type(info.module).__name__}, which engine="fsdp2" has divided. Write into the one that is there'
                    " (parameter.data.copy_(value)), or use ZeROStrategy(stage=2), whose engine takes another one as"
                    " one process does."
                )

    def begin_evaluation(self) -> None:
        """Before the first batch of an evaluation, and where training ends."""
        broadcast_together(list(self.module.buffers()), None, 0)

    def gathered_anew(self) -> list[Tensor]:
        """Weights that a backward does not have from its forward: this rank's shards of them."""
        if self.options.stage < 3:
            return []
        return [local_of(p.detach()) for p in self.module.parameters() if isinstance(p, DTensor)]

    def after_evaluation_step(self, is_last: bool) -> None:
        """Ranks may have different numbers of batches to evaluate: where some have come to their last and others have
        not, all gather everything once, and those go on alone. Collective until then.

        Args:
            is_last: whether this rank has no other batch.
        """
        if self._gradients.alone:
            if is_last:
                self._gradients.alone = False
                self._reshard_again()
            return
        some_are_last = some_end(is_last, self.control, self._waiting)
        parts = self._shardings[0].parts
        if some_are_last:
            with self._waiting("the other ranks' parts, for those with more batches to evaluate"):
                for part in parts:
                    part.unshard()
            if not is_last:
                self._gradients.alone = True
                groups = [group for part in parts for group in groups_of(part)]
                self._meshes = [(group, group.post_forward_mesh_info) for group in groups]
                for group in groups:
                    group.post_forward_mesh_info = None
        self.free_gathered()

    def _reshard_again(self) -> None:
        for group, mesh in self._meshes:
            group.post_forward_mesh_info = mesh
        self._meshes = []
        self.free_gathered()

    def free_gathered(self) -> None:
        """After an optimizer's step, and after a step of an evaluation."""
        if self._gradients.alone:
            return
        for sharding in self._shardings:
            sharding.free()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward."""
        take_over_gathered(self._shardings[0].parts)
        self._in_backward = True
        try:
            with self._gradients.backward():
                yield
        finally:
            self._in_backward = False

    def accumulating(self) -> AbstractContextManager[None]:
        """Around batches after which no optimizer steps; gradients are reduced all the same, to stay divided."""
        return nullcontext()

    def clip(self, parameters: Sequence[Tensor], value: float) -> Tensor:
        """Scale the gradients of these parameters to a norm of at most `value`; returns the norm they had."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        sharded = [g.to_local() for g in gradients if isinstance(g, DTensor)]
        whole = [g for g in gradients if not isinstance(g, DTensor)]
        norm = joined_norm(sharded, whole, 2.0, self.group, self.device)
        scale = (value / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local_of(g) for g in gradients], scale.to(local_of(gradients[0]).device))
        return norm

    def release(self, failed: bool = False) -> None:
        """Give the module back whole, on every rank's host. Collective; after a failure nobody is asked, and parameters
        of which other ranks have shards raise when they are read."""
        self._scalars.remove()
        self._data.remove()
        whole: dict[nn.Parameter, nn.Parameter] = {}
        for sharding in self._shardings:
            whole |= sharding.undo(failed)
        for optimizer in self._optimizers:
            give_whole(optimizer, whole)
        if failed:
            return
        for name, parameter in self.module.named_parameters():
            parameter.data = parameter.data.to(self.dtypes.get(clean_name(name), parameter.dtype))

    def to_device(self) -> None:
        """What is not sharded (buffers, metrics) moves to the device."""
        if not self.options.offload:
            self.module.to(self.device)
            return
        for owner in self.module.modules():
            if not any(isinstance(p, DTensor) for p in owner.parameters()):
                owner.to(self.device)
            for name, buffer in owner._buffers.items():
                owner._buffers[name] = None if buffer is None else buffer.to(self.device)


_BETWEEN = "SHARDED_POST_FORWARD"  # parameters of a smaller mesh stand in the modules


def _refuse_scalars(module: nn.Module) -> None:
    """Raise for parameters without a dimension, as the temperature of CLIP.

    Raises:
        ValueError: naming what divides them.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(
                f'engine="fsdp2" divides parameters along their first dimension, and `{name}` has none. Use'
                " ZeROStrategy(stage=2), or HybridStrategy(zero_stage=3), which divides flat vectors, or give it one"
                " dimension of length 1."
            )


def refuse_on_shards(optimizer: Optimizer) -> None:
    """Raise for optimizers whose arithmetic PyTorch does not do on shards.

    Raises:
        ValueError: naming what runs them.
    """
    if isinstance(optimizer, torch.optim.Rprop):
        raise ValueError(
            'engine="fsdp2" runs an optimizer on sharded tensors, and Rprop writes to some of their elements, which'
            " PyTorch does not do on shards. Use ZeROStrategy(stage=2), whose engine updates flat vectors, or another"
            " optimizer."
        )


def _refuse_hooks(module: nn.Module) -> None:
    """Raise for a hook on a parameter: backwards reach the gathered copies of parameters only.

    Raises:
        ValueError: a parameter has one.
    """
    for name, p in module.named_parameters():
        accumulated = (p._post_accumulate_grad_hooks or {}).values()
        if p._backward_hooks or any(map(_is_users, accumulated)):
            raise ValueError(
                f"`{clean_name(name)}` has a hook (register_hook, register_post_accumulate_grad_hook), which FSDP2 does"
                " not call: backwards reach the gathered copies of parameters. Change gradients in"
                ' on_before_optimizer_step, or use ZeROStrategy(stage=2, engine="native").'
            )


def _is_users(hook: Any) -> bool:
    """Whether a hook is not one that this package has put there to measure."""
    return not (getattr(hook, "__module__", None) or __name__).startswith("lightning_parallel.")
