"""What DeepSpeed holds where a hook would read it in vain: a parameter of stage 3 is empty between steps, and the
states of the optimizer are those of DeepSpeed's vectors.

An empty parameter has a norm of 0 and takes any clamp without a word. So outside of this library's own calls such a
parameter raises when its values are read or written, and `optimizer.state` raises too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from torch import nn
from torch.optim import Optimizer

from lightning_parallel.zero.closed_parameters import KeptPart, close, reopen
from lightning_parallel.zero.optimizer.guarded_state import GuardedState, give_back, own_methods

_F = TypeVar("_F", bound=Callable[..., Any])
_VALUES = (
    "`{what}` uses parameter `{name}`, which DeepSpeed's stage 3 leaves empty between steps. Where hooks read or write"
    ' parameters use ZeROStrategy(stage=2, engine="deepspeed"), or stage=3 with engine="fsdp2".'
)
_STATES = (
    'ZeROStrategy(engine="deepspeed"): the states of {name} are those of DeepSpeed\'s vectors, and this reads them as'
    " if they were the parameters'. Call trainer.strategy.optimizer_state(optimizer) on all ranks: rank 0 gets the"
    ' state dict that one process would have. Where hooks read or write states use engine="native".'
)
_METHODS = (
    "ZeROStrategy(engine=\"deepspeed\") runs an optimizer's step on DeepSpeed's vectors, and no other method:"
    ' {name}.{method} would not see the weights that train. Use engine="native", which runs it.'
)


class Veil:
    """Lies over parameters and states outside of `lifted`.

    Args:
        parameters: by name, those that DeepSpeed leaves empty.
        optimizer: the user's, None where nothing trains.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], optimizer: Optimizer | None) -> None:
        self._kept = [(p, KeptPart(name, p.new_empty(0), 0, 0, None, words=_VALUES)) for name, p in parameters]
        self._optimizer, self._depth, self._methods = optimizer, 1, dict[str, Any]()
        self._guard = None
        if optimizer is not None:
            name = type(optimizer).__name__
            self._guard = GuardedState(optimizer.state, _STATES.format(name=name))
            self._methods = {method: vars(optimizer).get(method) for method in own_methods(optimizer)}
            for method in self._methods:
                setattr(optimizer, method, _refusing(_METHODS.format(name=name, method=method)))

    def draw(self) -> None:
        """From now on hooks are told."""
        self._depth -= 1
        if self._depth:
            return
        for parameter, kept in self._kept:
            if not parameter.numel():  # small ones are whole on every rank
                close(parameter, kept)
        if self._optimizer is not None and self._guard is not None:
            self._guard.held, self._optimizer.state = self._optimizer.state, self._guard  # type: ignore[assignment]

    def lift(self) -> None:
        """This library, or DeepSpeed, is at work."""
        self._depth += 1
        if self._depth > 1:
            return
        for parameter, _ in self._kept:
            reopen(parameter)
        if self._optimizer is not None and self._guard is not None and self._optimizer.state is self._guard:
            self._optimizer.state = self._guard.held  # type: ignore[assignment]

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """A context without the veil."""
        self.lift()
        try:
            yield
        finally:
            self.draw()

    def remove(self) -> None:
        """The run is over."""
        self.lift()
        self._depth = 1 << 30
        if self._optimizer is not None:
            give_back(self._optimizer, self._methods)


def behind_veil(method: _F) -> _F:
    """A method of an object with a `veil` that runs without it."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        veil: Veil | None = getattr(args[0], "veil", None)
        if veil is None:
            return method(*args, **kwargs)
        with veil.lifted():
            return method(*args, **kwargs)

    return cast(_F, run)


def _refusing(words: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(words)

    return refuse
