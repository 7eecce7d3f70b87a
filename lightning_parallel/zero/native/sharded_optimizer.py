"""The user's optimizer updates this rank's elements: its groups hold the module's parameters, but for the time of a
step they hold the rank's segments of them.

The one idea: outside of a step nothing is different. Groups, learning rates, callbacks that add groups, `zero_grad` and
schedulers see the parameters that the user gave. State is kept by segment, 1-D. Gradients of 16 bits are made 32 bits
wide for a few buckets at a time, so that a whole copy of them never exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.native.bucket import Bucket
from lightning_parallel.zero.optimizer.elementwise import KNOWN
from lightning_parallel.zero.optimizer.guarded_state import GuardedState, give_back, own_methods, sharers, wrapped
from lightning_parallel.zero.optimizer.state_shapes import refuse_states
from lightning_parallel.zero.sharded_gradient import ShardedGradient

if TYPE_CHECKING:
    from lightning_parallel.zero.native.partition import Partition

_WIDENED_BYTES = 128 << 20  # gradients that are made wider at a time
_UPDATED_BYTES = 512 << 20  # of parameters that are updated at a time, while those before them are gathered
WORDS = (
    "The states of {name} are divided among the ranks, and this reads them on one. Call"
    " trainer.strategy.optimizer_state(optimizer) on all ranks: rank 0 gets the state dict that one process would have."
    " To go on with them, resume from a checkpoint."
)


class _Divided(GuardedState):
    """The states of an optimizer that is divided; once it is released, of which elements they are."""

    pieces: dict[nn.Parameter, tuple[tuple[int, int], nn.Parameter]] | None = None  # and the segments they lie in


class _WholeStates(defaultdict[Any, Any]):
    """The states of an optimizer by parameter, of which this rank holds all; `held` has them by segment."""

    held: Mapping[Any, Any]


class ShardedOptimizer:
    """Makes an optimizer's own methods work on segments; everything else of the optimizer stays.

    On one rank a segment is the parameter whole, and outside of methods `optimizer.state` is that of parameters, as in
    one process. On several it raises there (see `GuardedState`).

    Args:
        optimizer: as `configure_optimizers` made it, with the module's parameters in its groups.
        partition: where their segments are.

    Raises:
        ValueError: the optimizer has the states of a run that other ranks took part in.
    """

    def __init__(self, optimizer: Optimizer, partition: Partition) -> None:
        self.optimizer, self.partition = optimizer, partition
        self._checked = -1
        self._guard = _Divided({}, WORDS.format(name=type(optimizer).__name__))  # which holds states by segment
        left: Any = optimizer.state
        self._sharers = sharers(optimizer)
        names = ("step", "add_param_group", *own_methods(optimizer))
        self._before = {name: vars(optimizer).get(name) for name in names}
        self._step, self._add_group = optimizer.step, optimizer.add_param_group
        optimizer.step = wrapped(optimizer, self._step, self.step)  # type: ignore[method-assign]
        optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]
        for name in own_methods(optimizer):
            run = partial(self.call, name, getattr(optimizer, name))
            setattr(optimizer, name, wrapped(optimizer, getattr(optimizer, name), run))
        self._left: GuardedState | None = left if isinstance(left, GuardedState) else None
        if self._left is not None:
            self._set_state({})

    @property
    def names(self) -> list[str]:
        """The methods that were replaced."""
        return list(self._before)

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
        """Give the optimizer its own methods back. On several ranks its states stay divided, and guarded."""
        give_back(self.optimizer, self._before)
        if isinstance(self.optimizer.state, GuardedState):
            self._guard.pieces = {
                parameter: (self.partition.piece(parameter), segment)
                for parameter in self.parameters
                if (segment := self.partition.segment(parameter)) is not None
            }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`optimizer.add_param_group`, for a callback that unfreezes layers as training goes."""
        self._add_group(param_group)
        self.partition.cover(self.optimizer)

    # -- states --------------------------------------------------------------------------------------------------------

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """What this rank holds of a parameter's state; None if it holds nothing."""
        self.cut_states()
        if self._is_whole:
            return self.optimizer.state.get(parameter)
        segment = self.partition.segment(parameter)
        return None if segment is None else self._guard.held.get(segment)

    def held(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """What this rank updates of each parameter, and its state."""
        for parameter in self.parameters:
            segment, state = self.partition.segment(parameter), self.state_of(parameter)
            if segment is not None and state is not None:
                yield segment, state

    @property
    def _is_whole(self) -> bool:
        return self.partition.ranks.size == 1

    def cut_states(self) -> None:
        """State of whole parameters (Adagrad makes it at construction, a user loads it) becomes that of segments.

        Raises:
            ValueError: see the class.
        """
        if self._left is not None:
            self._take_left(self._left)
            self._left = None
        state = self.optimizer.state
        if self._is_whole or state is self._guard:
            return
        held = {key: value for key, value in state.items() if key not in self.partition.shapes}
        for parameter in self.parameters:
            segment = self.partition.segment(parameter)
            if segment is not None and state.get(parameter):
                held[segment] = self.partition.cut(parameter, state[parameter])
        self._guard.held = held
        self._set_state(self._guard)

    def _take_left(self, left: GuardedState) -> None:
        """The optimizer has states of an earlier run: go on with them if the same ranks hold the same parts."""
        pieces = getattr(left, "pieces", None)
        partition = self.partition
        if pieces is None or not all(
            partition.holds(p) and partition.piece(p) == piece for p, (piece, _) in pieces.items()
        ):
            left.refuse()
        states = {p: left.held.get(segment) for p, (_, segment) in pieces.items()}
        self._guard.held = {self.partition.segment(p): state for p, state in states.items() if state}
        self._set_state(self._guard)

    def _set_state(self, state: Any) -> None:
        for optimizer in self._sharers:
            optimizer.state = state

    @contextmanager
    def segments(self, parameters: Collection[int] | None = None) -> Iterator[None]:
        """Inside, groups and states are of this rank's segments; afterwards of the parameters, also of new groups.

        Args:
            parameters: ids of those whose segments the groups hold; default all.
        """
        self.cut_states()
        optimizer, segment = self.optimizer, self.partition.segment
        whole = {p: segment(p) for p in self.parameters} if self._is_whole else {}
        given = [group["params"] for group in optimizer.param_groups]
        for group, params in zip(optimizer.param_groups, given, strict=True):
            chosen = [p for p in params if parameters is None or id(p) in parameters]
            group["params"] = [s for s in map(segment, chosen) if s is not None]
        self._set_state(_renamed(optimizer.state, whole) if whole else defaultdict(dict, self._guard.held))
        try:
            yield
        finally:
            for group, params in zip(optimizer.param_groups, given, strict=True):
                group["params"] = params
            if whole:
                outside = _renamed(optimizer.state, {s: p for p, s in whole.items()})
                outside.held = optimizer.state
                self._set_state(outside)
            else:
                self._guard.held = optimizer.state
                self._set_state(self._guard)

    def _check_states(self) -> None:
        """After states were made: can they be put together from those of pieces?

        Raises:
            ValueError: they cannot.
        """
        pairs = list(self.held())
        count = sum(len(state) for _, state in pairs)
        if count != self._checked:
            refuse_states(self.optimizer, pairs, self.partition.who)
            self._checked = count

    # -- other methods than a step -------------------------------------------------------------------------------------

    def call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the optimizer's class that PyTorch's have not (`train` and `eval` of schedule-free ones): run it
        on this rank's elements, and gather everybody's. All ranks call it.

        Args:
            name: of the method.
            method: itself.
            *args, **kwargs: of it.
        """
        with self.partition.waiting(f"the other ranks to call {type(self.optimizer).__name__}.{name}"):
            self.partition.reducer.meet()
        self.partition.take_over()
        with self.segments():
            result = method(*args, **kwargs)
        self._gather(self.buckets)
        return result

    def _gather(self, buckets: Sequence[Bucket]) -> None:
        works = [bucket.gather(self.partition.traffic) for bucket in buckets]
        with self.partition.waiting("the other ranks' parameters"):
            for work in works:
                if work is not None:
                    work.wait()

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """`optimizer.step`: run the closure, update this rank's elements, gather everybody's.

        Args:
            closure: runs forward and backward.
            **kwargs: of the optimizer's own step.

        Returns:
            What the optimizer's own step returns, which is given a closure that has run.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            kwargs["closure"] = lambda: result
        if any(type(parameter.grad) is Tensor for parameter in self.parameters):
            self.partition.reducer.catch_up()
        self.partition.take_over()
        works = []
        for buckets in self._portions():
            with self._segments_of(buckets):
                returned = self._step(**kwargs)
            works += [bucket.gather(self.partition.traffic) for bucket in buckets if _has_gradients(bucket)]
        with self.partition.waiting("the other ranks' parameters"):
            for work in works:
                if work is not None:
                    work.wait()
        self._check_states()
        return returned

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
        chosen = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
        used = self._give_gradients([p for p in self.parameters if id(p) in chosen])
        try:
            with self.segments(chosen):
                yield
        finally:
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
                segment.grad = gradient.local.view_as(segment)
            else:
                wider.append((segment, gradient.local))
        _widen(wider)
        return used


def _renamed(state: Mapping[Any, Any], names: Mapping[Any, Any]) -> _WholeStates:
    """States under other keys."""
    return _WholeStates(dict, {names.get(key, key): value for key, value in state.items()})


def _widen(pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Give each segment a copy of its gradient in the segment's dtype, all in one piece of memory."""
    if not pairs:
        return
    segments = [segment for segment, _ in pairs]
    room = segments[0].detach().new_empty(sum(segment.numel() for segment in segments))
    views = list(room.split([segment.numel() for segment in segments]))
    torch._foreach_copy_(views, [local for _, local in pairs])
    for segment, view in zip(segments, views, strict=True):
        segment.grad = view.view_as(segment)


def _has_gradients(bucket: Bucket) -> bool:
    return any(parameter.grad is not None for parameter in bucket.parameters)
