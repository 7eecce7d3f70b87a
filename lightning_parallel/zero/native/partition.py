"""`Partition`: the parameters of a module's optimizers, divided among ranks as a stage of ZeRO says.

The one idea: it owns the buckets and knows for each parameter its bucket and its segment; reducer, optimizers and
checkpoints ask it. Stages 1 and 2 differ in one thing: whether the reduced gradients lie in a vector that stays.

`ShardedOptimizer` is the user's optimizer on it. Outside of a step nothing is different: groups, learning rates,
callbacks that add groups, `zero_grad` and schedulers see the parameters that the user gave. For the time of a step the
groups hold the rank's segments of them. State is kept by segment, 1-D. Gradients of 16 bits are made 32 bits wide for a
few buckets at a time, so that a whole copy of them never exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.collectives import Traffic, broadcast_all, broadcast_together
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.native.bucket import Bucket
from lightning_parallel.zero.native.gathered_bucket import GatheredBucket
from lightning_parallel.zero.native.layout import fill_buckets
from lightning_parallel.zero.optimizer.elementwise import KNOWN
from lightning_parallel.zero.optimizer.guarded_state import GuardedState, give_back, own_methods, sharers, wrapped
from lightning_parallel.zero.optimizer.state_shapes import refuse_states
from lightning_parallel.zero.ranks import Ranks
from lightning_parallel.zero.reducer import Reducer, Waiting
from lightning_parallel.zero.sharded_gradient import ShardedGradient

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
