"""`ShardedGradient`: what `parameter.grad` is once gradients were reduced and each rank keeps its part.

The one idea: it has the parameter's shape and dtype, and holds this rank's elements. What works element by element
(scaling, clamping, adding a whole tensor) works on these; norms and other sums are made whole over the ranks, so every
rank has to ask for them. What needs all elements at once raises, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.zero.norms import join_norms, joined_norm

aten = torch.ops.aten

_BY_ELEMENT = {
    aten.mul, aten.mul_, aten.div, aten.div_, aten.add, aten.add_, aten.sub, aten.sub_, aten.neg, aten.neg_, aten.zero_,
    aten.clamp, aten.clamp_, aten.clamp_min, aten.clamp_min_, aten.clamp_max, aten.clamp_max_, aten.abs, aten.square,
    aten.pow, aten.sign, aten.isnan, aten.isinf, aten.isfinite, aten.nan_to_num, aten.nan_to_num_, aten.copy_,
    aten.detach, aten.alias, aten.clone, aten._to_copy, aten.eq, aten.ne, aten.lt, aten.gt, aten.le, aten.ge,
    aten.zeros_like, aten.ones_like, aten.empty_like, aten.lerp_, aten.fill_, aten.logical_not,
    aten.addcmul, aten.addcmul_, aten.addcdiv, aten.addcdiv_, aten.masked_fill, aten.masked_fill_, aten.where,
}  # fmt: skip
_LISTS = {
    aten._foreach_mul_, aten._foreach_div_, aten._foreach_zero_, aten._foreach_clamp_min_, aten._foreach_clamp_max_,
    aten._foreach_add_, aten._foreach_neg_, aten._foreach_lerp_,
}  # fmt: skip
_SUMS: dict[Any, Any] = {
    aten.sum: dist.ReduceOp.SUM, aten.any: dist.ReduceOp.MAX, aten.all: dist.ReduceOp.MIN,
    aten.max: dist.ReduceOp.MAX, aten.min: dist.ReduceOp.MIN,
    aten.amax: dist.ReduceOp.MAX, aten.amin: dist.ReduceOp.MIN,
}  # fmt: skip


class ShardedGradient(Tensor):
    """A gradient of which this rank holds some elements.

    Args:
        local: those elements [k] in the order of the flattened gradient; k may be 0.
        like: the parameter, for shape, dtype and device.
        group: the ranks that hold the others.
        begin: the place of the first of them in the flattened gradient.

    Attributes:
        local: the elements.
        fresh: a whole gradient that a later backward added, until it is reduced.
    """

    local: Tensor
    group: Any
    begin: int
    fresh: Tensor | None
    _elsewhere: frozenset[Any] = frozenset()

    @staticmethod
    def __new__(
        cls: type[ShardedGradient], local: Tensor, like: Tensor, group: Any = None, begin: int = 0
    ) -> ShardedGradient:
        made = Tensor._make_wrapper_subclass(cls, like.shape, dtype=local.dtype, device=like.device)
        made.local, made.group, made.begin, made.fresh = local, group, begin, None
        return made

    def __init__(self, local: Tensor, like: Tensor, group: Any = None, begin: int = 0) -> None:
        """See the class."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["local"], (self.group, self.begin)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> ShardedGradient:
        return ShardedGradient(inner["local"], inner["local"].new_empty(size), *context)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, local={self.local!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet in (aten.add, aten.add_) and _is_made_by_a_backward(*args[:2]):
            if packet is aten.add:  # create_graph=True
                raise TypeError(_needs_all(args, packet))
            return add_to_reduce(args[0], args[1])
        if packet in _BY_ELEMENT:
            return _by_element(func, args, kwargs)
        if packet in _LISTS:
            func(*(_parts_beside(arg, args[0], args, packet) for arg in args), **kwargs)
            return None
        if packet is aten._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(func, *args)
        if packet in cls._elsewhere:
            raise TypeError(_needs_all(args, packet))
        if packet is aten.linalg_vector_norm:
            return _norm(*args, **kwargs)
        if packet in _SUMS:
            return _reduce(func, _SUMS[packet], args, kwargs)
        raise TypeError(_needs_all(args, packet))


class ShardedValues(ShardedGradient):
    """The values of a parameter of which this rank holds some elements, for what goes element by element: averages."""

    _elsewhere = frozenset({aten.linalg_vector_norm, *_SUMS})  # hooks that log it ask on one rank

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(_needs_all((self,), torch.save))


def total_norm(gradients: Sequence[Tensor], order: float, group: Any) -> Tensor:
    """The norm of all gradients together, float32 scalar, the same on every rank; every rank has to call it.

    Args:
        gradients: sharded ones, or whole ones that are alike on all ranks.
        order: of the norm, as 2.0 or infinity.
        group: the ranks among which sharded ones are divided.
    """
    sharded = [g.local for g in gradients if isinstance(g, ShardedGradient)]
    whole = [g for g in gradients if not isinstance(g, ShardedGradient)]
    return joined_norm(sharded, whole, order, group, gradients[0].device)


def local_part(gradient: Tensor) -> Tensor:
    """This rank's elements of a gradient, which is whole or divided."""
    return gradient.local if isinstance(gradient, ShardedGradient) else gradient


def _is_made_by_a_backward(gradient: Any, other: Any) -> bool:
    """Whether autograd adds a whole gradient, of this rank's rows, to what was reduced."""
    whole = type(gradient) is ShardedGradient and type(other) is Tensor and other.dim() >= min(gradient.dim(), 1)
    return whole and torch._C._current_graph_task_id() != -1


def add_to_reduce(gradient: Tensor, more: Tensor) -> Tensor:
    """Add to a gradient what a backward made on this rank: to one that was reduced, so that it waits to be, too."""
    if not isinstance(gradient, ShardedGradient):
        return gradient.add_(more)
    if more.shape != gradient.shape:
        raise TypeError(_needs_all((gradient,), aten.add_))
    gradient.fresh = more.detach() if gradient.fresh is None else gradient.fresh + more
    return gradient


def _by_element(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    packet, first = func.overloadpacket, next(arg for arg in args if isinstance(arg, ShardedGradient))
    in_place = func._schema.name.endswith("_")
    if kwargs.get("out") is not None or (in_place and first is not args[0]):
        raise TypeError(_needs_all(args, packet))
    result = func(*(_part_beside(arg, first, args, packet) for arg in args), **kwargs)
    return args[0] if in_place else type(first)(result, first, first.group, first.begin)


def _part_beside(arg: Any, gradient: ShardedGradient, args: Sequence[Any], packet: Any) -> Any:
    """Of a tensor the elements that a gradient has here; of one that is divided too, its own, which are to be the same.

    Raises:
        TypeError: it has another shape or other elements.
    """
    begin, end = gradient.begin, gradient.begin + gradient.local.numel()
    if isinstance(arg, ShardedGradient):
        if arg.shape != gradient.shape or (arg.begin, arg.local.numel()) != (begin, end - begin):
            raise TypeError(_needs_all(args, packet))
        return arg.local
    if not isinstance(arg, Tensor) or arg.dim() == 0:
        return arg
    if type(gradient) is not ShardedGradient or arg.dim() > gradient.dim():
        raise TypeError(_needs_all(args, packet))
    return arg.detach().expand(gradient.shape).reshape(-1)[begin:end]


def _parts_beside(arg: Any, gradients: Any, args: Sequence[Any], packet: Any) -> Any:
    """The same for lists of tensors that go with a list of gradients."""
    if not isinstance(arg, (list, tuple)):
        return arg
    pairs = list(zip(arg, gradients, strict=False))
    if any(isinstance(x, ShardedGradient) and not isinstance(g, ShardedGradient) for x, g in pairs):
        raise TypeError(_needs_all(args, packet))
    return [_part_beside(x, g, args, packet) if isinstance(g, ShardedGradient) else x for x, g in pairs]


def _norm(gradient: ShardedGradient, order: float = 2, dim: Any = None, *args: Any, dtype: Any = None) -> Tensor:
    if dim is not None and len(dim) != gradient.dim():
        raise TypeError(_needs_all((gradient,), aten.linalg_vector_norm))
    local = gradient.local if dtype is None else gradient.local.to(dtype)
    norm = torch.linalg.vector_norm(local, order) if local.numel() else local.new_zeros(())
    return join_norms(norm, order, gradient.group)


def _reduce(func: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    gradient = args[0]
    if len(args) > 1 or kwargs or not gradient.numel():
        raise TypeError(_needs_all(args, func.overloadpacket))
    neutral = {dist.ReduceOp.MAX: -float("inf"), dist.ReduceOp.MIN: float("inf")}.get(op, 0.0)
    empty = not gradient.local.numel()
    if gradient.is_complex():
        total = func(gradient.local) if not empty else gradient.local.new_zeros(())
        dist.all_reduce(torch.view_as_real(total), op=op, group=gradient.group)
        return total
    value = torch.full((), neutral, device=gradient.device) if empty else func(gradient.local)
    boolean, value = func.overloadpacket in (aten.any, aten.all), value.float()
    if empty and boolean:
        value.fill_(float(func.overloadpacket is aten.all))
    dist.all_reduce(value, op=op, group=gradient.group)
    return value.bool() if boolean else value.to(gradient.dtype)


def _unscale(func: Any, gradients: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Divide by the loss scale; what is not finite on one rank is found on all."""
    func(_locals(gradients), found_inf, inverse)
    sharded = next(g for g in gradients if isinstance(g, ShardedGradient))
    dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=sharded.group)


def _local(arg: Any) -> Any:
    return arg.local if isinstance(arg, ShardedGradient) else arg


def _locals(arg: Any) -> Any:
    return [_local(entry) for entry in arg] if isinstance(arg, (list, tuple)) else arg


def _needs_all(args: Sequence[Any], packet: Callable[..., Any]) -> str:
    gradient = next((arg for arg in args if isinstance(arg, ShardedGradient)), None)
    held = "" if gradient is None else f" of {gradient.numel()} elements, {gradient.local.numel()} of them here"
    name = getattr(packet, "__name__", packet)
    if isinstance(gradient, ShardedValues):
        return (
            f"A parameter that ZeRO divides among the ranks{held}, was given to `{name}`, which needs all of them. Read"
            " it inside `with trainer.strategy.whole_parameters():`, on all ranks."
        )
    return (
        f"A gradient that ZeRO divides among the ranks{held}, was given to `{name}`, which needs all of them. Scale,"
        " clamp or zero it, take norms and sums (on every rank), clip with self.clip_gradients(...); or gather the"
        " values with lightning_parallel.zero.sharded_gradient.gather_gradient(p.grad) on every rank."
    )


def gather_gradient(gradient: Tensor) -> Tensor:
    """The whole gradient, on every rank; all ranks call it. What is whole already comes back as it is.

    Example:
        >>> gather_gradient(torch.ones(2))
        tensor([1., 1.])
    """
    if not isinstance(gradient, ShardedGradient):
        return gradient
    sizes: list[Any] = [None] * dist.get_world_size(gradient.group)
    dist.all_gather_object(sizes, gradient.local.cpu(), group=gradient.group)
    return torch.cat(sizes).view(gradient.shape).to(gradient.device)
