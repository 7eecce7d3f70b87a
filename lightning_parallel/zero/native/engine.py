"""The engine of stages 1 and 2: what a strategy asks for, answered by a `Partition` on flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.accounting import StateBytes
from lightning_parallel.zero.collectives import broadcast_together
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.expected_bytes import ModelStates, most_of_ranks, promise, state_sizes
from lightning_parallel.zero.native.partition import Partition
from lightning_parallel.zero.optimizer.state import (
    Gather,
    full_optimizer_state,
    join_pieces,
    load_masters,
    load_optimizer_state,
    numbered_groups,
    own_masters,
    own_pieces,
)
from lightning_parallel.zero.sharded_gradient import total_norm

MASTERS = "master_weights"  # the key of a checkpoint under which 32-bit copies of 16-bit parameters are saved


class NativeEngine:
    """Runs stages 1 and 2.

    Args:
        partition: of the module that trains.
        broadcast_buffers: give all ranks the first one's buffers before every training step that is synchronised.
    """

    def __init__(self, partition: Partition, broadcast_buffers: bool = True) -> None:
        self.partition, self.broadcast_buffers, self._released = partition, broadcast_buffers, False
        rest = [p.detach() for p in partition.module.parameters() if not partition.holds(p)]
        broadcast_together([*rest, *partition.module.buffers()], None, partition.source)

    @property
    def replicas(self) -> Any:
        """The ranks that own the same parts elsewhere; None if there are none."""
        return self.partition.ranks.replicas

    # -- steps ---------------------------------------------------------------------------------------------------------

    def looking_at_steps(self) -> AbstractContextManager[None]:
        """Around a step: it holds the whole model, so it may take derivatives itself."""
        return nullcontext()

    def begin_step(self) -> None:
        """Before a training step."""
        self.partition.reducer.attach()
        if self.broadcast_buffers and self.partition.reducer.sync:
            self.partition.share_buffers()

    def begin_evaluation(self) -> None:
        """Before the first batch of an evaluation, and where training ends."""
        self.partition.reducer.pause()
        self.partition.share_buffers()

    def gathered_anew(self) -> list[Tensor]:
        """Weights that a backward does not have from its forward."""
        return []

    def after_evaluation_step(self, is_last: bool) -> None:
        """Every rank evaluates by itself."""

    def backward(self) -> AbstractContextManager[None]:
        """Around a backward."""
        return self.partition.reducer.backward()

    def accumulating(self) -> AbstractContextManager[None]:
        """Around batches after which no optimizer steps."""
        return self.partition.accumulating()

    def clip(self, parameters: Sequence[Tensor], value: float) -> Tensor:
        """Scale the gradients of these parameters to a norm of at most `value`; returns the norm they had."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        norm = total_norm(gradients, 2.0, self.partition.ranks.group)
        scale = (value / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([getattr(gradient, "local", gradient) for gradient in gradients], scale)
        return norm

    # -- states --------------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module, gather: Gather) -> dict[str, Any]:
        """The whole model's state; on the first rank in memory of its own, which a file may be made of."""
        state = module.state_dict()
        if self.partition.ranks.rank or self.partition.ranks.replica:
            return state
        return {name: _own_memory(value) for name, value in state.items()}

    def model_pieces(self, module: nn.Module) -> dict[str, dict[str, Any]]:
        """This rank's pieces of the model's state: 32-bit copies where there are some, the rest in turn."""
        self._take_over()
        masters, ranks = own_masters(self.partition), self.partition.ranks
        copied = {name for p, name in self.partition.names.items() if self._has_copy(p)}
        own = {
            name: {"value": _own_memory(value)}
            for turn, (name, value) in enumerate(module.state_dict().items())
            if name not in copied and turn % ranks.size == ranks.rank and not ranks.replica
        }
        return own | {name: {"value": fields["master"]} for name, fields in masters.items()}

    def _has_copy(self, parameter: nn.Parameter) -> bool:
        """Whether any rank updates a copy of 32 bits of a parameter."""
        narrow = parameter.dtype in (torch.float16, torch.bfloat16)
        return narrow and self.partition.options.master_weights and self.partition.holds(parameter)

    def optimizer_pieces(self, optimizer: Optimizer) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """This rank's pieces of an optimizer's state, and its groups."""
        return own_pieces(self.partition.sharded(optimizer)), numbered_groups(optimizer)

    def load_model_state(self, module: nn.Module, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Take over a checkpoint's weights, and the 32-bit copies if it has them."""
        module.load_state_dict(checkpoint["state_dict"], strict=strict)
        self.partition.refresh()
        self.load_masters(checkpoint.get(MASTERS) or wider(checkpoint["state_dict"], module))

    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Take over 32-bit copies, by the names of their parameters."""
        load_masters(self.partition, masters)

    def optimizer_state(self, optimizer: Optimizer, gather: Gather) -> dict[str, Any]:
        """The whole optimizer's state on the gathering rank, nothing elsewhere."""
        return full_optimizer_state(self.partition.sharded(optimizer), gather)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole optimizer's state."""
        self.partition.cover(optimizer)
        load_optimizer_state(self.partition.sharded(optimizer), state)

    def extra_state(self, gather: Gather) -> dict[str, Any]:
        """What a checkpoint needs beside weights and optimizer states."""
        if not any(bucket.updated.dtype != bucket.own.dtype for bucket in self.partition.buckets):
            return {}
        self._take_over()
        parts = gather(own_masters(self.partition))
        if parts is None:
            return {}
        return {MASTERS: {name: fields["master"] for name, fields in join_pieces(parts).items()}}

    def model_states(self, optimizers: Sequence[Optimizer]) -> ModelStates:
        """What the paper promises this rank, and what the buckets add; all ranks call it, after an optimizer's step."""
        return states_of_partition(self.partition, optimizers, self.partition.module.parameters())

    def keep_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Before the ranks part: what may be saved afterwards. It stays where it is."""

    def release(self, failed: bool = False) -> None:
        """Give module and optimizers back, also after a failure."""
        self._released = True
        self.partition.release(failed)

    def _take_over(self) -> None:
        if not self._released:
            self.partition.take_over()


def states_of_partition(
    partition: Partition, optimizers: Sequence[Optimizer], parameters: Iterable[nn.Parameter]
) -> ModelStates:
    """What the paper promises this rank of these parameters, and what the buckets add; all ranks call it, after an
    optimizer's step."""
    buckets = [b for b in partition.buckets if b.expected]
    layouts, ranks = [b.layout for b in buckets], partition.ranks
    first = buckets[0].parameters[0].element_size()
    count = sum(sum(layout.numels) for layout in layouts)
    parts = sum(layout.part for layout in layouts)
    stage, whole = partition.options.stage, parts * ranks.size
    held = parts + len(buckets) if stage == 3 else whole  # the number behind each part that closed parameters read
    by_element, counters = state_sizes(pair for o in optimizers for pair in partition.sharded(o).held())
    copied = max(bucket.updated.element_size() if bucket.has_copy else 0 for bucket in buckets)
    by_element, copied = most_of_ranks([by_element, copied], partition.control)
    copies = sum(bucket.layout.part for bucket in buckets if bucket.has_copy)
    trained = {p for bucket in buckets for p in bucket.parameters}
    return promise(
        stage, ranks.size, count, StateBytes(first, first, copied + by_element), first,
        held={"parameters": held, "gradients": parts if stage >= 2 else whole, "copy": copies}, copy_bytes=copied,
        owned=sum(k for bucket in buckets for _, k in bucket.places), counters=counters,
        frozen=sum(p.nbytes for p in parameters if p not in trained),
    )  # fmt: skip


def wider(state: Mapping[str, Any], module: nn.Module) -> dict[str, Tensor]:
    """What a state dict holds with more bits than the module: a sharded checkpoint saves 32-bit copies as weights."""
    own = {clean_name(name): parameter for name, parameter in module.named_parameters()}
    return {
        name: value
        for name, value in state.items()
        if name in own and isinstance(value, Tensor) and value.element_size() > own[name].element_size()
    }


def _own_memory(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
