"""`Partition`: the parameters of a module's optimizers, divided among ranks as a stage of ZeRO says.

The one idea: it owns the buckets and knows for each parameter its bucket and its segment; reducer, optimizers and
checkpoints ask it. Stages 1 and 2 differ in one thing: whether the reduced gradients lie in a vector that stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.collectives import Traffic, broadcast_all, broadcast_together
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.native.bucket import Bucket
from lightning_parallel.zero.native.gathered_bucket import GatheredBucket
from lightning_parallel.zero.native.layout import fill_buckets
from lightning_parallel.zero.native.sharded_optimizer import ShardedOptimizer
from lightning_parallel.zero.ranks import Ranks
from lightning_parallel.zero.reducer import Reducer, Waiting

Agree = Callable[[str, Sequence[str]], None]


@dataclass(frozen=True)
class Options:
    """How to divide.

    Args:
        stage: 1 or 2; 3, where whoever runs the module opens and closes `GatheredBucket`s.
        bucket_bytes: of the gradients that are reduced at a time, C_B of the paper.
        master_weights: whether parameters of 16 bits have a copy of 32 bits that the optimizer updates.
        offload: where optimizer states and the copy live; None is the parameters' device.
    """

    stage: int = 2
    bucket_bytes: int = 128 << 20
    master_weights: bool = True
    offload: torch.device | None = None


class Partition:
    """Divides what a module's optimizers update.

    Args:
        module: whose parameters they are; on its device, and alike on all ranks or about to be made so.
        optimizers: as `configure_optimizers` made them.
        ranks: who shares.
        options: how.
        control: a group for host tensors of all ranks that see different rows.
        source: the global rank whose parameters all begin with.
        waiting: a context entered while this process is blocked.
        agree: raises unless all ranks give it the same; called when groups are added.
        group: all ranks that see different rows, on the device; None is the default group.
        apart: what parameters must have in common to lie in one bucket, a sortable value.
        who: divides, for messages.

    Attributes:
        filled: what is called when more parameters have been put into buckets.

    Raises:
        ValueError: an optimizer has parameters that the module does not register.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        ranks: Ranks,
        options: Options,
        control: Any = None,
        source: int = 0,
        waiting: Waiting = lambda what: nullcontext(),
        agree: Agree = lambda what, names: None,
        group: Any = None,
        apart: Callable[[nn.Parameter], Any] = lambda parameter: (),
        who: str = "ZeROStrategy",
    ) -> None:
        self.module, self.ranks, self.options = module, ranks, options
        self.control, self.source, self.waiting, self._agree = control, source, waiting, agree
        self._group, self._apart, self.who = group, apart, who
        self.traffic = Traffic()
        self.reducer = Reducer(self.traffic, control, waiting, self.name_of)
        self.buckets: list[Bucket] = []
        self._slots: dict[nn.Parameter, tuple[int, int]] = {}
        self.shapes: dict[nn.Parameter, torch.Size] = {}  # as divided; others may change them in the end
        self.optimizers: list[ShardedOptimizer] = []
        self.filled: list[Callable[[], None]] = []
        self.take(optimizers)

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """Have these optimizers update parts, of parameters in buckets and of new ones; all ranks call it.

        Raises:
            ValueError: see the class.
        """
        self.optimizers += [ShardedOptimizer(optimizer, self) for optimizer in optimizers]
        for optimizer in optimizers:
            self.cover(optimizer)

    # -- what lies where -----------------------------------------------------------------------------------------------

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """The name of each of the module's parameters, as it is saved."""
        return {parameter: clean_name(name) for name, parameter in self.module.named_parameters()}

    def name_of(self, parameter: nn.Parameter) -> str:
        """A parameter's name, in quotes."""
        return f"`{self.names.get(parameter, '?')}`"

    def slot(self, parameter: nn.Parameter) -> tuple[int, int]:
        """The number of a parameter's bucket, and its own in the bucket."""
        return self._slots[parameter]

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether an optimizer has the parameter, so that it lies in a bucket."""
        return parameter in self._slots

    def segment(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """What this rank's optimizer updates of a parameter, 1-D; None where this rank owns nothing of it."""
        bucket, index = self._slots[parameter]
        return self.buckets[bucket].segments[index]

    def part(self, parameter: nn.Parameter, wide: bool) -> Tensor | None:
        """This rank's elements of a parameter, 1-D; `wide`: of what the optimizer updates, which may have more bits."""
        number, index = self._slots[parameter]
        bucket = self.buckets[number]
        at, k = bucket.places[index]
        return (bucket.updated if wide else bucket.own)[at : at + k] if k else None

    def piece(self, parameter: nn.Parameter) -> tuple[int, int]:
        """From which to which element of the flattened parameter this rank owns."""
        bucket, index = self._slots[parameter]
        return self.buckets[bucket].layout.piece(index, self.ranks.rank)

    def cut(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of an optimizer's state of a whole parameter."""
        begin, end = self.piece(parameter)
        return {
            field: self._cut(value, begin, end) if is_by_element(field, value, parameter.shape) else value
            for field, value in state.items()
        }

    def _cut(self, value: Tensor, begin: int, end: int) -> Tensor:
        return value.detach().clone() if self.ranks.size == 1 else value.flatten()[begin:end].clone()

    def cover(self, optimizer: Optimizer) -> None:
        """Put the parameters of an optimizer that have no bucket yet into buckets; all ranks call it.

        Raises:
            ValueError: one is not registered by the module.
        """
        names, groups = self.names, optimizer.param_groups
        new = [p for group in groups for p in group["params"] if p not in self._slots]
        unknown = [p for p in new if p not in names]
        if unknown:
            raise ValueError(
                f"configure_optimizers gave {type(optimizer).__name__} {len(unknown)} parameters that the"
                " LightningModule does not register. Assign their module to an attribute of the LightningModule."
            )
        order = {parameter: i for i, parameter in enumerate(names)}
        new = sorted(dict.fromkeys(new), key=order.__getitem__, reverse=True)  # as a backward comes by
        self._agree(f"group {len(groups) - 1} of {type(optimizer).__name__}", [names[p] for p in new])
        self.fill(new)
        self.sharded(optimizer).cut_states()

    def fill(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put parameters into new buckets, what trains apart from what does not, dtype by dtype; all ranks call it."""
        options = self.options
        parameters = sorted(parameters, key=lambda p: (not p.requires_grad, self._apart(p)))
        keys = [(p.requires_grad, p.dtype, p.device, self._apart(p)) for p in parameters]
        groups = fill_buckets(keys, [p.nbytes for p in parameters], options.bucket_bytes)
        made: list[Bucket] = []
        for indices in groups:
            members = [parameters[i] for i in indices]
            for index, parameter in enumerate(members):
                self._slots[parameter] = (len(self.buckets) + len(made), index)
                self.shapes[parameter] = parameter.shape
            kind = GatheredBucket if options.stage == 3 else Bucket
            made.append(kind(members, self.ranks, options.master_weights, options.stage == 1, options.offload))
        broadcast_all([bucket.flat for bucket in made], self._group, self.source)
        names = self.names
        for bucket in made:
            bucket.refresh()
            if isinstance(bucket, GatheredBucket):
                bucket.names = [names.get(parameter, "") for parameter in bucket.parameters]
                bucket.close()
        self.buckets += made
        self.reducer.add(made)
        for told in self.filled:
            told()

    def sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        """What updates this rank's part of an optimizer's parameters."""
        return next(sharded for sharded in self.optimizers if sharded.optimizer is optimizer)

    # -- steps ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around batches after which the optimizer does not step: stage 1 keeps whole gradients and moves nothing."""
        self.reducer.sync = False
        try:
            yield
        finally:
            self.reducer.sync = True

    def share_buffers(self) -> None:
        """All ranks get the first one's buffers, as DistributedDataParallel does before a forward."""
        with self.waiting("the other ranks, to have one's buffers"):
            broadcast_together(list(self.module.buffers()), self._group, self.source)

    def refresh(self) -> None:
        """The module's parameters were written to."""
        for bucket in self.buckets:
            bucket.refresh()

    def take_over(self) -> None:
        """Before parameters are updated or saved: hooks may have written to them."""
        for bucket in self.buckets:
            bucket.take_over()

    def release(self, failed: bool = False) -> None:
        """Leave module and optimizers as they were without ZeRO; states stay those of segments, which can be saved."""
        self.reducer.detach()
        for sharded in self.optimizers:
            sharded.release()
        for bucket in self.buckets:
            bucket.release(failed)


def is_by_element(field: str, value: Any, shape: torch.Size) -> bool:
    """Whether a field of an optimizer's state has an entry for each element of the parameter."""
    return isinstance(value, Tensor) and field != "step" and value.shape == shape
