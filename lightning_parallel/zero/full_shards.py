"""The engine of stage 3, and of stage 2 if asked for, on PyTorch's FSDP2.

The one idea: FSDP2 divides parameters, gradients and so optimizer states, gathers a block before it computes and
reduces its gradients behind it. This class decides what it is given, and speaks of states in pieces of one process's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from lightning_parallel.zero.collectives import broadcast_all, broadcast_together
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.norms import joined_norm
from lightning_parallel.zero.reducer import Waiting
from lightning_parallel.zero.shard_gradients import ShardGradients
from lightning_parallel.zero.shard_states import ShardOptions, ShardStates
from lightning_parallel.zero.sharding import Sharding
from lightning_parallel.zero.shards import called, find_blocks, keep_dtype, local_of

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
        self._shardings = [self._shard(m) for m in (module, *copies)]
        names = {part: clean_name(name) or type(module).__name__ for name, part in module.named_modules()}
        parts = self._shardings[0].parts
        named = [names[cast(nn.Module, part)] for part in parts]
        self._gradients = ShardGradients(parts, named, control, device.type == "cpu", waiting)

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

    def begin_step(self) -> None:
        """Before a training step."""
        if not self._looked_for_hooks:
            _refuse_hooks(self.module)
            self._looked_for_hooks = True
        if self.broadcast_buffers:
            broadcast_together(list(self.module.buffers()), None, 0)

    def begin_evaluation(self) -> None:
        """Before the first batch of an evaluation, and where training ends."""
        broadcast_together(list(self.module.buffers()), None, 0)

    def free_gathered(self) -> None:
        """After an optimizer's step, and after a step of an evaluation."""
        for sharding in self._shardings:
            sharding.free()

    def backward(self) -> AbstractContextManager[None]:
        """Around a backward."""
        return self._gradients.backward()

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

    def release(self) -> None:
        """Give the module back whole, on every rank's host. Collective."""
        for sharding in self._shardings:
            sharding.undo()
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
