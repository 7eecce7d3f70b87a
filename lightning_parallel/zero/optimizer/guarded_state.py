"""`optimizer.state` while a rank holds a part of it: whoever reads the whole is told so.

The optimizer's own methods run inside `exposed`, where `state` and the groups are what the rank holds. Outside, a hook
that reads `len(optimizer.state)`, `optimizer.state[p]` or `optimizer.state_dict()` would see one rank's share and take
it for all, so `state` is a mapping there that raises with what to do instead. Replacing it by another mapping, or
clearing it, resets the states, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NoReturn

from torch.optim import Optimizer

States = dict[Any, Any]


class GuardedState(dict[Any, Any]):
    """The states of an optimizer that one rank does not hold whole.

    Args:
        held: what this rank holds.
        words: said to whoever reads it.
        whole: whether this rank holds all of the state of a key, which may then be read.

    Attributes:
        of: once a run is over, the ids of the parameters whose states these are.

    Example:
        >>> GuardedState({}, "Divided.")
        GuardedState(Divided.)
    """

    of: list[int] | None = None

    def __init__(self, held: States, words: str, whole: Callable[[Any], bool] = lambda key: False) -> None:
        super().__init__()
        self.held, self.words, self._whole = held, words, whole

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise for a reader.

        Raises:
            ValueError: always.
        """
        raise ValueError(self.words)

    __len__ = __iter__ = __reversed__ = __eq__ = __ne__ = __or__ = __ior__ = __delitem__ = refuse
    __setitem__ = keys = values = items = copy = pop = popitem = setdefault = update = refuse
    __copy__ = __deepcopy__ = __reduce_ex__ = refuse
    __hash__ = None

    def __bool__(self) -> bool:
        self.refuse()

    def __contains__(self, key: object) -> bool:
        return key in self.held if self._whole(key) else self.refuse()

    def __getitem__(self, key: Any) -> Any:
        return self.held[key] if self._whole(key) else self.refuse()

    def get(self, key: Any, default: Any = None) -> Any:
        return self.held.get(key, default) if self._whole(key) else self.refuse()

    def clear(self) -> None:
        self.held.clear()

    def __repr__(self) -> str:
        return f"GuardedState({self.words})"


def held_state(optimizer: Optimizer) -> States:
    """What this rank holds of an optimizer's states.

    Example:
        >>> import torch
        >>> len(held_state(torch.optim.SGD([torch.zeros(1)], lr=0.1)))
        0
    """
    return getattr(optimizer.state, "held", optimizer.state)


@contextmanager
def exposed(optimizer: Optimizer) -> Iterator[None]:
    """Inside, `optimizer.state` is what this rank holds."""
    guard = optimizer.state
    if not isinstance(guard, GuardedState):
        yield
        return
    optimizer.state = guard.held  # type: ignore[assignment]
    try:
        yield
    finally:
        guard.held, optimizer.state = optimizer.state, guard


@contextmanager
def covered(optimizer: Optimizer, guard: GuardedState) -> Iterator[None]:
    """Inside, `optimizer.state` is guarded again: around a closure that a method runs inside `exposed`."""
    guard.held, optimizer.state = optimizer.state, guard  # type: ignore[assignment]
    try:
        yield
    finally:
        optimizer.state = guard.held


def sharers(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those that it holds and shares its states with (a Lookahead around an Adam)."""
    inner = (value for value in vars(optimizer).values() if isinstance(value, Optimizer))
    return [optimizer, *(value for value in inner if value.state is optimizer.state)]


def own_methods(optimizer: Optimizer) -> list[str]:
    """Public methods of an optimizer that are not those of every `torch.optim.Optimizer`.

    Example:
        >>> import torch
        >>> own_methods(torch.optim.SGD([torch.zeros(1)], lr=0.1))
        []
    """
    found: dict[str, None] = {}
    for kind in type(optimizer).__mro__:
        if kind is Optimizer:
            break
        for name, value in vars(kind).items():
            is_method = callable(value) and not isinstance(value, type)
            if is_method and not name.startswith("_") and not hasattr(Optimizer, name):
                found[name] = None
    return list(found)


class GuardedOptimizer:
    """An optimizer whose groups hold what one rank has: its state is guarded outside of its own methods.

    Args:
        optimizer: whose.
        words: see `GuardedState`.
        whole: see `GuardedState`.
    """

    def __init__(self, optimizer: Optimizer, words: str, whole: Callable[[Any], bool]) -> None:
        self.optimizer = optimizer
        left = optimizer.state
        if isinstance(left, GuardedState):  # of an earlier run, which may have divided otherwise
            if getattr(left, "of", None) != self._parameters():
                left.refuse()
            optimizer.state = left.held  # type: ignore[assignment]
        self._before = {name: vars(optimizer).get(name) for name in ("step", *own_methods(optimizer))}
        self._guard = GuardedState(optimizer.state, words, whole)
        for name in self._before:
            method = getattr(optimizer, name)
            run = self._step if name == "step" else self._call
            setattr(optimizer, name, wrapped(optimizer, method, partial(run, method)))
        optimizer.state = self._guard  # type: ignore[assignment]

    @property
    def names(self) -> list[str]:
        """The methods that were replaced."""
        return list(self._before)

    def release(self) -> None:
        """Give the optimizer its own methods back; its state stays guarded, since it is a part still."""
        self._adopt()
        self._guard.of = self._parameters()
        give_back(self.optimizer, self._before)

    def undo(self) -> None:
        """Leave the optimizer as it was."""
        self._adopt()
        self.optimizer.state = self._guard.held  # type: ignore[assignment]
        give_back(self.optimizer, self._before)

    def _parameters(self) -> list[int]:
        return [id(p) for group in self.optimizer.param_groups for p in group["params"]]

    def _adopt(self) -> None:
        if self.optimizer.state is not self._guard:  # somebody has put another one there
            self._guard.held, self.optimizer.state = self.optimizer.state, self._guard  # type: ignore[assignment]

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._adopt()
        with exposed(self.optimizer):
            return method(*args, **kwargs)

    def _step(self, method: Callable[..., Any], closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        def run() -> Any:
            assert closure is not None
            with covered(self.optimizer, self._guard):
                return closure()

        self._adopt()
        with exposed(self.optimizer):
            return method(**kwargs) if closure is None else method(closure=run, **kwargs)


def wrapped(optimizer: Optimizer, method: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` as a bound method of the optimizer that looks like `method`, with the marks that schedulers leave on it."""

    def call(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    vars(call).update(getattr(method, "__dict__", {}))
    call.__name__, call.__doc__ = getattr(method, "__name__", "method"), method.__doc__
    return MethodType(call, optimizer)


def give_back(optimizer: Optimizer, before: Mapping[str, Any]) -> None:
    """Attributes of an optimizer become what they were; None was none of its own."""
    for name, value in before.items():
        if value is None:
            vars(optimizer).pop(name, None)
        else:
            vars(optimizer)[name] = value
