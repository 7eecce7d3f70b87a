"""A model of which no tensor axis cuts anything: what everyone may ask of one that is cut, answered for one that is
not.

The one idea: pipelines, checkpoints and norms ask the same few questions of every model, and do not ask whether it is
cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_parallel.parallel.shares import ShardMap


class Uncut:
    """Every rank of the tensor axis, of which there is one, holds parameters whole."""

    shares: Mapping[str, ShardMap] = {}  # of every parameter that is cut, by each of its names
    summed: Collection[nn.Parameter] = ()  # whose gradients are sums over the axis, to be made after backwards

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add gradients of this step up over the axis, in place, of some of `summed`; all ranks call it."""

    def cut(self) -> None:
        """Make this rank's part of every parameter its data; all ranks hold equal values before."""

    def cut_copy(self, model: nn.Module) -> None:
        """The same for a copy of the model that somebody keeps beside it."""

    def whole(self, name: str, value: Tensor) -> Tensor:
        """The whole of what is cut like the parameter of that name; all ranks call it, and all get it."""
        return value

    def part(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of what is whole."""
        return value

    def counts(self, name: str) -> bool:
        """Whether this rank's part of a parameter is one that counts in norms."""
        return True

    def make_whole(self, failed: bool = False) -> None:
        """Give every parameter its whole data back; all ranks call it."""

    def release(self) -> None:
        """Give every module its own class and attributes back."""

    def whole_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """`whole` for all tensors in an optimizer's state of a parameter."""
        return {key: self.whole(name, x) if isinstance(x, Tensor) else x for key, x in state.items()}

    def part_of_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """`part` for all tensors in an optimizer's state of a parameter."""
        return {key: self.part(name, x) if isinstance(x, Tensor) else x for key, x in state.items()}
