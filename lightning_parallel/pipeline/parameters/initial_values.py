"""Initial values of modules that are built without memory, drawn as one process draws them.

Under `seed_everything` a user expects the weights of one process, whose module draws them one after the other from one
generator. So what initialises a parameter without memory is noted, with the state of the generator, and random numbers
are drawn at once into memory that is thrown away: the generator goes on as in one process. Where a rank keeps the
parameter, what was noted is done again.

Noted are operators that write in place. One that reads such a parameter and gives something else (a QR of it) is given
its values. Left out: seeds of other devices than the one on which a module draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

_OVERWRITE = {
    "uniform_",
    "normal_",
    "fill_",
    "zero_",
    "copy_",
    "exponential_",
    "bernoulli_",
    "random_",
    "trunc_normal_",
}
_KEPT_ELEMENTS = 1 << 16  # of parameters on other devices than the host; there memory that nobody touches takes none


@dataclass(frozen=True)
class _ElementView:
    """Elements of a parameter that has no memory."""

    key: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Write:
    """An operator that wrote to parameters, and the state of the generator before it."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    state: Tensor | None
    own_state: Tensor | None  # of a generator that it was given


@dataclass
class _ParameterStorage:
    """What a parameter's memory would be: its values before anything was noted, and the numbers of writes to it."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    initial: Tensor | None
    writes: list[int] = field(default_factory=list)
    is_lost: bool = False  # whether something without values was written to it


class Drawing(TorchDispatchMode):
    """Notes how parameters get their initial values; a context around `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, _ParameterStorage] = {}
        self._writes: list[_Write] = []
        self._alive: list[Any] = []  # storages, whose addresses must not be given to others

    def __deepcopy__(self, memo: dict[int, Any]) -> Drawing:
        return self

    def take(self, parameter: nn.Parameter, real: Tensor) -> None:
        """A parameter has lost its memory.

        Args:
            parameter: now on the meta device.
            real: what it was.
        """
        storage = parameter.untyped_storage()
        self._alive.append(storage)
        keeps = real.device.type == "cpu" or real.numel() <= _KEPT_ELEMENTS
        whole = real.as_strided((_extent(real),), (1,), 0) if keeps else None
        self._storages[storage._cdata] = _ParameterStorage(_extent(real), real.dtype, real.device, whole)
        self.know(parameter)

    def know(self, parameter: nn.Parameter) -> None:
        """A parameter is registered again, or another one in the same place."""
        if self._knows(parameter):
            parameter._drawing = self  # type: ignore[attr-defined]

    def values_of(self, parameter: Tensor) -> Tensor | None:
        """The initial values of a parameter; None if they were not all noted."""
        with torch.no_grad():
            view = self._view(parameter)
            storage = self._storages[view.key]
            first = self._writes[storage.writes[0]] if storage.writes else None
            overwrites = first is not None and _overwrites(first, storage.numel)
            if storage.is_lost or (storage.initial is None and not overwrites):
                return None
            return self._real(view, len(self._writes), {})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.scalar_tensor.default and str(kwargs.get("device")) == "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}  # a number that is about to be assigned
        leaves = [x for x in _tensors((args, kwargs)) if self._knows(x)]
        if not leaves or func in _ASK:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            if not any(self._knows(x) for x in _written(func, args, kwargs)):
                return func(*self._realized(args), **self._realized(kwargs))
            self._note(func, args, kwargs)
            return func(*_on_meta(args), **_on_meta(kwargs))
        result = func(*args, **kwargs) if all(x.device.type == "meta" for x in _tensors((args, kwargs))) else None
        if result is not None and all(self._knows(x) for x in _tensors(result)) and _tensors(result):
            return result  # a view
        return func(*self._realized(args), **self._realized(kwargs))

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        random, device = torch.Tag.nondeterministic_seeded in func.tags, self._device(args)
        generator = kwargs.get("generator")
        state = _state(device) if random and generator is None else None
        own_state = generator.get_state() if random and generator is not None else None
        write = _Write(func, self._viewed(args), self._viewed(kwargs), state, own_state)
        number = len(self._writes)
        if random:  # the generator goes on
            func(*self._realized(args, empty=True), **self._realized(kwargs, empty=True))
        self._writes.append(write)
        lost = any(x.device.type == "meta" and not self._knows(x) for x in _tensors((args, kwargs)))
        for key in {self._view(x).key for x in _written(func, args, kwargs) if self._knows(x)}:
            self._storages[key].writes.append(number)
            self._storages[key].is_lost |= lost

    def _device(self, args: Any) -> torch.device:
        return self._storages[self._view(next(x for x in _tensors(args) if self._knows(x))).key].device

    # -- from what was noted to values ---------------------------------------------------------------------------------

    def _real(self, view: _ElementView, until: int, memo: dict[tuple[int, int], Tensor]) -> Tensor:
        """What a view shows before the write of number `until`."""
        storage = self._storages[view.key]
        done = sum(number < until for number in storage.writes)
        if (view.key, done) not in memo:
            flat = torch.empty(storage.numel, dtype=storage.dtype, device=storage.device)
            if storage.initial is not None:
                flat.copy_(storage.initial)
            for number in storage.writes[:done]:
                self._again(number, view.key, flat, memo)
            memo[view.key, done] = flat
        return memo[view.key, done].as_strided(view.size, view.stride, view.offset)

    def _again(self, number: int, key: int, flat: Tensor, memo: dict[tuple[int, int], Tensor]) -> None:
        """Do a write once more, to this memory."""
        write = self._writes[number]

        def real(x: Any) -> Any:
            if not isinstance(x, _ElementView):
                return x
            return flat.as_strided(x.size, x.stride, x.offset) if x.key == key else self._real(x, number, memo)

        args, kwargs = tree_map(real, write.args), tree_map(real, write.kwargs)
        if write.own_state is not None:
            kwargs["generator"] = torch.Generator(flat.device)
            kwargs["generator"].set_state(write.own_state)
        before = _state(flat.device) if write.state is not None else None
        if write.state is not None:
            _set_state(flat.device, write.state)
        write.func(*args, **kwargs)
        if before is not None:
            _set_state(flat.device, before)

    # -- tensors without memory ----------------------------------------------------------------------------------------

    def _knows(self, tensor: Tensor) -> bool:
        return tensor.device.type == "meta" and tensor.untyped_storage()._cdata in self._storages

    def _view(self, tensor: Tensor) -> _ElementView:
        key = tensor.untyped_storage()._cdata
        return _ElementView(key, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def _viewed(self, tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: self._view(x) if self._knows(x) else x.detach(), tree)

    def _realized(self, tree: Any, empty: bool = False) -> Any:
        """Known tensors with memory; `empty`: of any values, for what overwrites or does not depend on them."""

        def real(x: Tensor) -> Tensor:
            if not self._knows(x):
                return x
            if empty:
                return torch.zeros(x.shape, dtype=x.dtype, device=self._storages[self._view(x).key].device)
            return self._real(self._view(x), len(self._writes), {})

        return tree_map_only(Tensor, real, tree)


class _NotMeta(TorchFunctionMode):
    """Functions of `nn.init` leave out what is on the meta device: there these tensors say that they are not."""

    def __init__(self, drawing: Drawing) -> None:
        super().__init__()
        self._drawing = drawing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and self._drawing._knows(args[0]):
            return False
        return func(*args, **(kwargs or {}))


@contextmanager
def drawing(wanted: bool) -> Iterator[Drawing | None]:
    """A context in which initial values are noted, if that is wanted."""
    if not wanted:
        yield None
        return
    with Drawing() as mode, _NotMeta(mode):
        yield mode


def drawn_values(parameter: nn.Parameter) -> Tensor | None:
    """The initial values of a parameter that was built in `drawing`, whole; None where they were not noted."""
    mode: Drawing | None = getattr(parameter, "_drawing", None)
    return None if mode is None else mode.values_of(parameter)


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_ASK = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def _extent(tensor: Tensor) -> int:
    """How many elements the memory of a tensor has, from its storage's begin."""
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + reach + 1


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _on_meta(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x if x.device.type == "meta" or x.dim() == 0 else x.to("meta"), tree)


def _overwrites(write: _Write, numel: int) -> bool:
    first = next((x for x in write.args if isinstance(x, _ElementView)), None)
    count = 1
    for n in first.size if first is not None else ():
        count *= n
    return write.func.overloadpacket.__name__ in _OVERWRITE and first is not None and count == numel


def _state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
