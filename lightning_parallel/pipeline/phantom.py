"""Phantoms: tensors with shape, dtype and device and no data, standing for what another stage holds.

The one idea: on stage s the user's step runs as written. What other stages computed is a `Phantom`; arithmetic between
Phantoms is arithmetic on shapes, so masks, position ids and views come out right without a transfer. At the stage's
first block the Phantoms among its arguments are *bound* to the values the previous stage sent, and from then on reading
a bound Phantom reads the value, gradients included. What was computed from Phantoms remembers how, so that a stage that
needs it after all can compute it from values that it gets. A Phantom that is read and has no value raises: it is never
silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline import foreach
from lightning_parallel.pipeline.callers import called_past_its_module

_READS_DATA = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__"}
_GET_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_inferred: dict[Any, Tensor] = {}
_shapes_only = [False]
# Types of arguments that neither are nor hold Phantoms.
PLAIN = {Tensor, nn.Parameter, bool, int, float, str, type(None)}
_OF_PARAMETER = {
    *("__get__", "__set__", "__delete__", "__hash__", "__len__", "__repr__", "requires_grad_", "detach"),
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "element_size"),
    *("is_floating_point", "is_complex", "is_contiguous"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),  # optimizers that make their state at construction
    "copy_",  # into a stand-in: the stage that holds the data does it for real
    *("_has_compatible_shallow_copy_type", "to", "cpu", "cuda"),  # `module.to`
    *("type", "double", "float", "half", "bfloat16"),
}


Leaf = tuple[str, int]  # a unit and the number of a tensor in what it returns


class PhantomError(RuntimeError):
    """The user's step read or wrote something that lives on another stage."""


class Unread(PhantomError):
    """It asked for data where only shapes are known."""


class Overwritten(Unread):
    """It wrote what is not known here into a tensor that is."""


@dataclass
class Recipe:
    """How a Phantom was computed.

    Args:
        func, args, kwargs: the call; lists and dicts among the arguments are copies.
        tensors: the tensors among them, and how often each had been written to.
        grad: whether the call was with gradients.
        draws: how many random operators had run before.
        index: which of the results the Phantom is, None if it is the only one.
    """

    func: Callable
    args: Any
    kwargs: Any
    tensors: list[tuple[Tensor, int]]
    grad: bool
    draws: int
    index: int | None = None

    @classmethod
    def of(cls, func: Callable, args: Any, kwargs: Any) -> Recipe:
        """The recipe of a call that is about to be made."""
        tensors: list[tuple[Tensor, int]] = []
        args, kwargs = _kept(args, tensors), _kept(kwargs, tensors)
        return cls(func, args, kwargs, tensors, torch.is_grad_enabled(), _random.count)

    def holds(self) -> bool:
        """Whether the arguments are still what they were."""
        return all(version_of(tensor) == version for tensor, version in self.tensors)


def _kept(tree: Any, tensors: list[tuple[Tensor, int]]) -> Any:
    """Arguments that nobody changes later: containers copied, tensors noted."""
    if isinstance(tree, Tensor):
        if not isinstance(tree, Phantom):
            tensors.append((tree, version_of(tree)))
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(_kept(x, tensors) for x in tree)
    if type(tree) is dict:
        return {key: _kept(x, tensors) for key, x in tree.items()}
    return tree


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


class _Random:
    """Counts operators that draw random numbers: what they give cannot be computed again."""

    count = 0


_random = _Random()


class Phantom(Tensor):
    """What another stage holds: shape, stride, dtype and device, without data.

    Attributes:
        meta: the same tensor on the meta device.
        origin: what it stands for, in words, for error messages.
        value: the tensor it is bound to, or None.
        version: how often that tensor had been written to when it was bound.
        leaf: for what a unit returned, (unit, number of the tensor in what it returned).
        recipe: for what was computed from other Phantoms, how; None if it cannot be computed again.
        leaves: the Phantoms that were not computed and that it comes from; empty if it is one.
        spoilt: whether it, or what shares its memory, was written to without a value.
    """

    meta: Tensor
    origin: str
    value: Tensor | None
    version: int
    leaf: Leaf | None
    recipe: Recipe | None
    leaves: tuple[Phantom, ...]
    spoilt: bool

    def __new__(cls, meta: Tensor, device: torch.device, origin: str, requires_grad: bool = False) -> Phantom:
        phantom = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        phantom.meta, phantom.origin, phantom.value = meta, origin, None
        phantom.leaf, phantom.recipe, phantom.leaves, phantom.spoilt = None, None, (), False
        return phantom

    def bind(self, value: Tensor) -> None:
        """Let this Phantom stand for a tensor that is there."""
        self.value, self.version = value, version_of(value)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = phantoms_in(args) + phantoms_in(kwargs)
        allowed = func.__name__ in _OF_PARAMETER or _shapes_only[0]
        for x in leaves:
            if x.value is not None:
                return func(*with_values(args), **with_values(kwargs))
            if isinstance(x, (ForeignParameter, ForeignGradient)) and not allowed:
                raise Unread(_unread(x, f"`{func.__name__}` uses it outside its module"))
        if func.__name__ in _READS_DATA:
            raise Unread(_unread(leaves[0], f"`{func.__name__.strip('_')}` reads its data"))
        recipe = Recipe.of(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            result = func(*args, **kwargs)
        _remember(recipe, leaves, result)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Any operation on a Phantom runs on meta tensors and gives a Phantom."""
        kwargs = dict(kwargs or {})
        if func._schema.name.startswith("aten::_foreach_") and (real := foreach.positions_without(args, phantoms_in)):
            return foreach.apart(func, args, kwargs, real)
        first = (phantoms_in(args) or phantoms_in(kwargs))[0]
        written = _refuse_writes(func, args, kwargs, first) if func._schema.is_mutable else None
        if torch.Tag.nondeterministic_seeded in func.tags:
            func(*_made_real(args), **_made_real(kwargs))
            _random.count += 1
        device = first.device
        if kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), torch.device("meta")
        try:
            result = _infer(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise Unread(_unread(first, f"`{func}` has no answer from shapes alone ({error})")) from error
        if written is not None:
            _refuse_reshape(func, written, result)
            for leaf in written.leaves or (written,):
                leaf.spoilt = True
            return written
        if isinstance(result, Tensor):
            return Phantom(result, device, first.origin)
        return tree_map_only(Tensor, lambda t: Phantom(t, device, first.origin), result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Phantom(shape={tuple(self.meta.shape)}, dtype={self.meta.dtype}, stands for {self.origin})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Phantom:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PhantomError(
            f"This process does not hold {self.origin} and cannot save it. Use trainer.save_checkpoint(path) on every"
            " rank: it gathers the whole model."
        )


class ForeignParameter(Phantom):
    """A parameter of another stage: optimizers may group it by name and shape, computation may not use it.

    Attributes:
        has_gradient: whether its stage made a gradient by now. `grad` is then a Phantom too, so that a loop over all
            gradients (a norm, a clipping of one's own) raises where it would leave other stages out in silence.
    """

    has_gradient = False

    def __new__(cls, like: Tensor, device: torch.device, name: str, stages: Sequence[int]) -> ForeignParameter:
        origin = f"parameter `{name}` of stage {', '.join(map(str, stages))}"
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        parameter: Any = Phantom.__new__(cls, meta, device, origin, requires_grad=like.requires_grad)
        parameter._is_param = True
        return parameter

    @classmethod
    def __torch_function__(cls, func: Callable, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_GRADIENT and isinstance(args[0], ForeignParameter) and args[0].has_gradient:
            return ForeignGradient(args[0].meta, args[0].device, f"the gradient of {args[0].origin}")
        if func == _SET_DATA and isinstance(args[0], ForeignParameter) and isinstance(args[1], Phantom):
            args[0].meta = args[1].meta  # `module.to` gave it another dtype
        if func == torch.equal:  # of parameters it is asked whether they are the same one
            return args[0] is args[1]
        return super().__torch_function__(func, types, args, kwargs)


class ForeignGradient(Phantom):
    """The gradient of a parameter of another stage."""


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules of all stages may run, on shapes: inside, parameters of other stages compute as any Phantom does.

    What comes out cannot be read, so this is for asking for shapes (a summary of the model) and nothing else.
    """
    before, _shapes_only[0] = _shapes_only[0], True
    try:
        yield
    finally:
        _shapes_only[0] = before


def asks_for_shapes() -> bool:
    """Whether `shapes_only` holds."""
    return _shapes_only[0]


def bound(x: Phantom) -> Tensor:
    """The value a Phantom was bound to, or the Phantom itself."""
    return x if x.value is None else x.value


def _remember(recipe: Recipe, sources: Sequence[Phantom], result: Any) -> None:
    """Note on every new Phantom of a result how it was computed, if it can be: from units' results, without drawing."""
    again = _random.count == recipe.draws and all(source.leaf or source.recipe for source in sources)
    parts = [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else []
    leaves = tuple({id(leaf): leaf for source in sources for leaf in source.leaves or (source,)}.values())
    for index, part in enumerate(parts):
        if isinstance(part, Phantom) and not any(part is source for source in sources):
            part.recipe = replace(recipe, index=None if part is result else index) if again else None
            part.leaves = leaves


def phantoms_in(tree: Any) -> list[Phantom]:
    """The Phantoms in nested tuples, lists and dicts, in order. (By hand: it runs with every call of every block.)"""
    if isinstance(tree, Phantom):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [phantom for x in tree if type(x) not in PLAIN for phantom in phantoms_in(x)]


def with_values(tree: Any) -> Any:
    """Nested tuples, lists and dicts with every bound Phantom replaced by its value."""
    return tree_map_only(Phantom, bound, tree)


def _infer(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives on meta tensors; remembered where it gives one new tensor, since asking is slow."""
    try:
        key = (func, _key(args), _key(tuple(kwargs.items())))
        if key in _inferred:
            return _inferred[key]
    except TypeError:  # an argument that cannot be a key
        key = None
    result = func(*_on_meta(args), **_on_meta(kwargs))
    if key is not None and isinstance(result, Tensor) and not func._schema.is_mutable and len(_inferred) < 4096:
        _inferred[key] = result
    return result


def _key(x: Any) -> Any:
    if isinstance(x, Tensor):
        meta = x.meta if isinstance(x, Phantom) else x
        return (tuple(meta.shape), meta.stride(), meta.storage_offset(), meta.dtype)
    if isinstance(x, (tuple, list)):
        return tuple(_key(entry) for entry in x)
    return (type(x), x)


def _on_meta(tree: Any) -> Any:
    """An operator's arguments with every tensor on the meta device."""
    if isinstance(tree, Tensor):  # metas are shared: an operator in place gets one of its own
        return tree.meta.detach() if isinstance(tree, Phantom) else tree.detach().to("meta")
    if isinstance(tree, (tuple, list)):
        return [_on_meta(x) for x in tree]
    if isinstance(tree, dict):
        return {key: _on_meta(x) for key, x in tree.items()}
    return tree


def _made_real(tree: Any) -> Any:
    """An operator's arguments with memory: a draw moves the generators as it does on the stage that has the data."""
    return tree_map_only(
        Phantom, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1), tree
    )


def _refuse_writes(func: Any, args: Any, kwargs: Any, source: Phantom) -> Phantom | None:
    """Raise if a Phantom would be written into a real tensor; give the Phantom that is written in place, if any."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = args[i] if i < len(args) else kwargs.get(argument.name)
        for real in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(real, Tensor) and not isinstance(real, Phantom):
                raise Overwritten(
                    _unread(source, f"`{func}` writes it into a real tensor of shape {tuple(real.shape)}")
                )
        if isinstance(target, Phantom):
            return target
    return None


def _refuse_reshape(func: Any, written: Phantom, result: Any) -> None:
    """A Phantom that was written in place must still have the shape that it shows."""
    if isinstance(result, Tensor) and (result.shape, result.stride()) != (written.shape, written.stride()):
        name = func._schema.name.split("::")[-1]
        raise PhantomError(
            f"The step changes the shape of {written.origin} in place with `{name}`, which a stage that does not hold"
            f" its data cannot follow. Use `{name.rstrip('_')}`, which returns the result."
        )


def _unread(x: Phantom, what: str) -> str:
    if isinstance(x, ForeignGradient) or x.origin.startswith("the gradient of"):  # or what was computed from one
        return (
            f"The module reads {x.origin}, which this stage does not hold: {what}. Clip with self.clip_gradients(...)"
            " or Trainer(gradient_clip_val=...), which count every stage; take norms over parameters whose grad this"
            " rank holds."
        )
    if isinstance(x, ForeignParameter) and (call := called_past_its_module(x)) is not None:
        return (
            f"The step calls {call}, and so uses {x.origin}, which this stage does not hold. Stages follow calls of"
            " whole modules alone: call the module, and let its forward do what you need of it, or make that a module"
            " of its own."
        )
    if isinstance(x, ForeignParameter) or x.origin.startswith("parameter `"):
        return (
            f"The step uses {x.origin}, which this stage does not hold: {what}. Compute such a term from a module's own"
            " forward, tie the parameter to a module of this stage, or use the optimizer's weight_decay."
        )
    return (
        f"The step reads {x.origin}, whose data this stage does not hold: {what}. Pass the value through the blocks"
        " (as an argument of the block where the stage begins), or choose blocks= so that producer and reader share a"
        " stage."
    )
