"""Does a module that was cut compute what it computed whole? Asked at its first call, with weights drawn at random.

The one idea: that unmodified code takes the number of its heads from an attribute is an assumption, and code that does
not may go on with wrong numbers. So the first call of every kind of cut module is made three times: with a copy of the
module as it was, with the module as it is, both under the same random weights (fresh ones attend to everything alike,
and would hide a mistake), and then as it was meant. Random numbers and weights are left as they were found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

_FEW_ROWS = 0.1  # two experts have to be as likely as rounding is fine; wrong positions or heads change all rows
_SLACK = 0.05  # of the largest value: half precision rounds by less, wrong heads change by all of it


class Check:
    """What is known of one cut module until its first call.

    Args:
        name: the module's.
        size: ranks of the tensor axis.
        part: cuts a whole parameter by its name in the model.
        whole_shapes: shapes of the whole parameters by name in the module.
        were: by submodule's name, its class and the attributes that were changed, as they were.
        routed: whether a router chooses experts in it: rounding sends some rows to others.
    """

    def __init__(
        self,
        name: str,
        size: int,
        part: Callable[[str, Tensor], Tensor],
        whole_shapes: Mapping[str, tuple[int, ...]],
        were: Mapping[str, tuple[type, Mapping[str, Any]]],
        routed: bool = False,
    ) -> None:
        self._few = _FEW_ROWS if routed else 0.0
        self.name, self.size, self.part, self.whole_shapes, self.were = name, size, part, whole_shapes, were

    def __deepcopy__(self, memo: dict[int, Any]) -> Check:
        return self

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Compare a module, which `call` calls, with what it was.

        Raises:
            ValueError: they compute different values.
        """
        with suppress(_CannotCopy), torch.no_grad(), _no_cached_casts(), torch.random.fork_rng(_devices(module)):
            wholes = self._draw(module)
            twin = self._twin(module, wholes)
            expected = _call(twin, twin, args, kwargs)
            with _in_place_of(module, {n: self.part(f"{self.name}.{n}", x) for n, x in wholes.items()}):
                found = _call(module, call, args, kwargs)
            self._compare(found, expected)

    def _draw(self, module: nn.Module) -> dict[str, Tensor]:
        """Random weights, equal on all ranks: gains around one, matrices that give features of one or more."""
        generator = torch.Generator().manual_seed(0)
        drawn = {}
        for name, like in module.named_parameters():
            shape = self.whole_shapes[name]
            value = torch.randn(shape, generator=generator)
            value = 1 + 0.1 * value if len(shape) < 2 else value * 3 / max(shape) ** 0.5
            drawn[name] = value.to(like.device, like.dtype)
        return drawn

    def _twin(self, module: nn.Module, wholes: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the module as it was before it was cut, with other weights."""
        memo: dict[int, Any] = {
            id(p): nn.Parameter(wholes[name], requires_grad=False) for name, p in module.named_parameters()
        }
        try:
            twin = copy.deepcopy(module, memo)
        except Exception as error:
            raise _CannotCopy from error
        for name, inner in twin.named_modules():
            inner.__class__, attributes = self.were[name]
            inner.__dict__.update(attributes)
            inner.__dict__.pop("_pipeline_hook", None)
        return twin

    def _compare(self, found: Any, expected: Any) -> None:
        for ours, theirs in zip(_floats(found), _floats(expected), strict=False):
            if ours.shape != theirs.shape or far_from(ours, theirs, self._few):
                raise ValueError(
                    f"`{self.name}` computes other values on {self.size} ranks of the tensor axis than whole: its code"
                    " does not follow tensor_plan. Attention has to take the number of its heads from an attribute"
                    " named num_heads, n_head, num_attention_heads or the like, and matrices kept as one need"
                    ' their number in the plan ("colwise:3" for query, key and value). Or leave the module out of'
                    " tensor_plan."
                )
            return  # the first value is the result; others may be heads' own (attention weights)


class _CannotCopy(Exception):
    """Something in a module or among its arguments cannot be copied, and is not checked."""


def _call(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call with copies of what is not a tensor: a cache would keep what it is given."""

    def own(x: Any) -> Any:
        return x.detach() if isinstance(x, Tensor) else copy.deepcopy(x)

    try:
        args, kwargs = tree_map(own, (args, kwargs))
    except Exception as error:
        raise _CannotCopy from error
    with evaluated(module):
        return call(*args, **kwargs)


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """A module in evaluation mode, without gradients, for a while."""
    modes = [(inner, inner.training) for inner in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for inner, mode in modes:
            inner.training = mode


def far_from(ours: Tensor, theirs: Tensor, few: float = 0.0) -> bool:
    """Whether values [.., features] differ by more than what rounding in half precision explains, in more than a few
    rows (a share of all)."""
    far = (ours.float() - theirs.float()).abs() > _SLACK * theirs.float().abs().amax()
    return bool(far.any(-1).float().mean() > few)


@contextmanager
def _in_place_of(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Other data for the parameters of a module, for a while."""
    before = {name: parameter.data for name, parameter in module.named_parameters()}
    try:
        for name, parameter in module.named_parameters():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in module.named_parameters():
            parameter.data = before[name]


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Autocast would keep the casts of random weights, which no gradient goes through, for the calls that follow."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _floats(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_flatten(tree)[0] if isinstance(x, Tensor) and x.is_floating_point())


def _devices(module: nn.Module) -> list[torch.device]:
    return [p.device for p in module.parameters() if p.device.type == "cuda"][:1]
