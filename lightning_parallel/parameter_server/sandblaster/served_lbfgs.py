"""`torch.optim.LBFGS` as it is, on vectors that never leave the servers.

The one idea: torch's L-BFGS, its line search too, asks a dozen operations of vectors (dot, axpy, scale, copy, the
largest magnitude); a ``Vector`` here is a name, and each operation a call that all ranges do (``lbfgs.py``). So
the algorithm is torch's own code, and what comes back is numbers. Left out: who computes gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.parameter_server.sandblaster.lbfgs import VectorShards


class Vector:
    """A vector on the ranges, with what torch's L-BFGS asks of a tensor; float64.

    Args:
        shards: where it lies.
        names: of vectors that are there, and of those that nobody holds any more.

    Example:
        >>> from lightning_parallel.parameter_server.sandblaster.lbfgs import LocalShards
        >>> space = Space(LocalShards([torch.tensor([1.0, -2.0]), torch.tensor([4.0])]))
        >>> x = space.copy("x")
        >>> x.dot(x.neg()).item(), x.abs().max().item(), torch.mul(x, 2.0).abs().sum().item()
        (-21.0, 4.0, 14.0)
    """

    def __init__(self, space: Space, name: str) -> None:
        self.space, self.name = space, name
        weakref.finalize(self, space.unused.append, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.mul:
            return args[0].mul(args[1])
        raise NotImplementedError(f"A vector on servers has no {function}.")

    def clone(self, **_: object) -> Vector:
        return self.space.copy(self.name)

    def copy_(self, other: Vector) -> Vector:
        self.space.call("copy", other.name, self.name)
        return self

    def neg(self) -> Vector:
        return self.mul(-1.0)

    def mul(self, number: float | Tensor) -> Vector:
        new = self.clone()
        self.space.call("scale", new.name, float(number))
        return new

    def add_(self, other: Vector, alpha: float | Tensor = 1.0) -> Vector:
        self.space.call("axpy", float(alpha), other.name, self.name)
        return self

    def sub(self, other: Vector) -> Vector:
        return self.clone().add_(other, alpha=-1.0)

    def dot(self, other: Vector) -> Tensor:
        return self.space.number("dot", self.name, other.name)

    def abs(self) -> Magnitudes:
        return Magnitudes(self)


class Magnitudes:
    """The magnitudes of a vector's elements, of which only the largest and the sum are asked for."""

    def __init__(self, vector: Vector) -> None:
        self._vector = vector

    def max(self) -> Tensor:
        return self._vector.space.number("max", self._vector.name)

    def sum(self) -> Tensor:
        return self._vector.space.number("norm1", self._vector.name)


class Space:
    """The vectors that a coordinator has on the ranges; those that it holds no more are dropped with the next call.

    Args:
        shards: the ranges.
    """

    def __init__(self, shards: VectorShards) -> None:
        self.shards, self.unused, self._made = shards, list[str](), 0

    def call(self, *words: str | float) -> float:
        """Have the ranges do something."""
        while self.unused:
            self.shards.call("drop", self.unused.pop())
        return self.shards.call(*words)

    def number(self, *words: str | float) -> Tensor:
        """What a call comes to, as torch's code wants numbers."""
        return torch.tensor(self.call(*words), dtype=torch.float64)

    def copy(self, name: str) -> Vector:
        """A copy of a vector."""
        new = self._name()
        self.call("copy", name, new)
        return Vector(self, new)

    def put(self, values: Tensor) -> Vector:
        """A vector of such values, shape (size,)."""
        new = self._name()
        self.call("zero", new, "x")
        self.shards.call("add", new, vector=values)
        return Vector(self, new)

    def _name(self) -> str:
        self._made += 1
        return f"v{self._made}"


class ServedLBFGS(torch.optim.LBFGS):
    """torch's L-BFGS, whose point is ``x`` on the ranges and whose gradient is ``g``.

    Args:
        optimizer: gives the groups, so that what a scheduler changes is seen; its parameters are left alone.
        space: the ranges.
        pack: makes one packed vector of a vector of all parameters' elements.
    """

    def __init__(self, optimizer: torch.optim.LBFGS, space: Space, pack: Callable[[Tensor], Tensor]) -> None:
        super().__init__(optimizer.param_groups[0]["params"])
        self.param_groups, self.space = optimizer.param_groups, space
        first = self.param_groups[0]["params"][0]
        for name, value in optimizer.state.get(first, {}).items():
            self.state[first][name] = each(value, lambda one: space.put(pack(one)) if one.dim() else one, Tensor)

    def saved(self, unpack: Callable[[str], Tensor]) -> dict[str, Any]:
        """The state as one process has it.

        Args:
            unpack: gives all parameters' elements of a vector on the ranges, by its name.
        """
        state: Mapping[str, Any] = self.state[self.param_groups[0]["params"][0]]
        found = {name: each(value, lambda one: unpack(one.name), Vector) for name, value in state.items()}
        return {name: each(value, lambda one: one.float(), Tensor) for name, value in found.items()}

    def _gather_flat_grad(self) -> Vector:
        return self.space.copy("g")

    def _add_grad(self, step_size: float | Tensor, update: Vector) -> None:
        self.space.call("axpy", float(step_size), update.name, "x")

    def _clone_param(self) -> Vector:
        return self.space.copy("x")

    def _set_param(self, params_data: Vector) -> None:
        self.space.call("copy", params_data.name, "x")


def each(value: Any, function: Callable[[Any], Any], kind: type) -> Any:
    """A value, or a list of values, with a function applied to those of a kind.

    Example:
        >>> each([1, "a", None], lambda one: one + 1, int)
        [2, 'a', None]
    """
    if isinstance(value, list):
        return [each(one, function, kind) for one in value]
    return function(value) if isinstance(value, kind) else value
