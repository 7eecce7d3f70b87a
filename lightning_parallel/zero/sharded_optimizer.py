"""The user's optimizer updates this rank's elements: its groups hold the module's parameters, but for the time of a
step they hold the rank's segments of them.

The one idea: outside of a step nothing is different. Groups, learning rates, callbacks that add groups, `zero_grad` and
schedulers see the parameters that the user gave. State is kept by segment, 1-D. Gradients of 16 bits are made 32 bits
wide for a few buckets at a time, so that a whole copy of them never exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.bucket import Bucket
from lightning_parallel.zero.elementwise import KNOWN
from lightning_parallel.zero.gradient import ShardedGradient

if TYPE_CHECKING:
    from lightning_parallel.zero.partition import Partition

_WIDENED_BYTES = 128 << 20  # gradients that are made wider at a time
_UPDATED_BYTES = 512 << 20  # of parameters that are updated at a time, while those before them are gathered


class ShardedOptimizer:
    """Makes `optimizer.step` work on segments; everything else of the optimizer stays.

    Args:
        optimizer: as `configure_optimizers` made it, with the module's parameters in its groups.
        partition: where their segments are.
    """

    def __init__(self, optimizer: Optimizer, partition: Partition) -> None:
        self.optimizer, self.partition = optimizer, partition
        self._step, self._add_group = optimizer.step, optimizer.add_param_group
        step = MethodType(lambda _, *args, **kwargs: self.step(*args, **kwargs), optimizer)
        vars(step.__func__).update(getattr(self._step, "__dict__", {}))  # a scheduler leaves marks on it
        optimizer.step = step  # type: ignore[method-assign]
        optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all groups, in order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets in which the optimizer has parameters, in the order in which a forward needs them."""
        numbers = {self.partition.slot(parameter)[0] for parameter in self.parameters}
        return [self.partition.buckets[number] for number in sorted(numbers, reverse=True)]

    def release(self) -> None:
        """Give the optimizer its own methods back."""
        for name in ("step", "add_param_group"):
            vars(self.optimizer).pop(name, None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`optimizer.add_param_group`, for a callback that unfreezes layers as training goes."""
        self._add_group(param_group)
        self.partition.cover(self.optimizer)

    def cut_states(self) -> None:
        """State that was made for whole parameters (Adagrad makes it at construction) becomes that of segments."""
        for parameter in self.parameters:
            segment, state = self.partition.segment(parameter), self.optimizer.state.pop(parameter, None)
            if segment is not None:
                cut = self.partition.cut(parameter, state or {})
                self.optimizer.state.setdefault(segment, {}).update(cut)

    @contextmanager
    def segments(self) -> Iterator[None]:
        """The groups hold this rank's segments of all parameters; afterwards the parameters, also of new groups."""
        given = [group["params"] for group in self.optimizer.param_groups]
        for group, params in zip(self.optimizer.param_groups, given, strict=True):
            group["params"] = [s for s in map(self.partition.segment, params) if s is not None]
        try:
            yield
        finally:
            for group, params in zip(self.optimizer.param_groups, given, strict=True):
                group["params"] = params

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """`optimizer.step`: run the closure, update this rank's elements, gather everybody's.

        Args:
            closure: runs forward and backward.
            **kwargs: of the optimizer's own step.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if any(type(parameter.grad) is Tensor for parameter in self.parameters):
            self.partition.reducer.catch_up()
        works = []
        for buckets in self._portions():
            with self._segments_of(buckets):
                self._step(**kwargs)
            works += [bucket.gather(self.partition.traffic) for bucket in buckets if _has_gradients(bucket)]
        with self.partition.waiting("the other ranks' parameters"):
            for work in works:
                if work is not None:
                    work.wait()
        return result

    def _portions(self) -> Iterator[list[Bucket]]:
        """Buckets to update at a time: as many as may have their gradients made wider, or keep the device busy.

        All at once for an optimizer that is not PyTorch's: it may count its steps in a group.
        """
        buckets, portion, share = self.buckets, [], 0.0
        for bucket in buckets:
            portion.append(bucket)
            share += bucket.updated.nbytes / (_WIDENED_BYTES if bucket.has_copy else _UPDATED_BYTES)
            if share >= 1 and type(self.optimizer) in KNOWN:
                yield portion
                portion, share = [], 0.0
        if portion or not buckets:
            yield portion

    @contextmanager
    def _segments_of(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """The groups hold segments of these buckets with their gradients; afterwards they are as before."""
        given = [group["params"] for group in self.optimizer.param_groups]
        chosen = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
        used = self._give_gradients([p for params in given for p in params if id(p) in chosen])
        for group, params in zip(self.optimizer.param_groups, given, strict=True):
            segments = [self.partition.segment(p) for p in params if id(p) in chosen]
            group["params"] = [segment for segment in segments if segment is not None]
        try:
            yield
        finally:
            for group, params in zip(self.optimizer.param_groups, given, strict=True):
                group["params"] = params
            for segment in used:
                segment.grad = None

    def _give_gradients(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Segments get this rank's part of the reduced gradients, in their own dtype and place."""
        used: list[nn.Parameter] = []
        wider: list[tuple[nn.Parameter, Tensor]] = []
        for parameter in parameters:
            segment, gradient = self.partition.segment(parameter), parameter.grad
            if segment is None or not isinstance(gradient, ShardedGradient):
                continue
            used.append(segment)
            if gradient.local.dtype == segment.dtype and gradient.local.device == segment.device:
                segment.grad = gradient.local
            else:
                wider.append((segment, gradient.local))
        _widen(wider)
        return used


def _widen(pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Give each segment a copy of its gradient in the segment's dtype, all in one piece of memory."""
    if not pairs:
        return
    segments = [segment for segment, _ in pairs]
    room = segments[0].detach().new_empty(sum(segment.numel() for segment in segments))
    views = list(room.split([segment.numel() for segment in segments]))
    torch._foreach_copy_(views, [local for _, local in pairs])
    for segment, view in zip(segments, views, strict=True):
        segment.grad = view


def _has_gradients(bucket: Bucket) -> bool:
    return any(parameter.grad is not None for parameter in bucket.parameters)
