"""From tensors to what is said of them in a header, from that to Phantoms, and from Phantoms to values again.

The one idea: a stage that computes describes what it returned; a later one summons Phantoms from the description; where
one of them, or what was computed from it, is needed after all, it is made real from what has come by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from lightning_parallel.pipeline.phantoms.phantom import Phantom, phantoms_in, with_values
from lightning_parallel.pipeline.phantoms.stand_in import Leaf, Recipe, version_of


@dataclass(frozen=True)
class TensorMeta:
    """Shape, stride and dtype of a tensor, to be sent in a header."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Packed:
    """What is said of a `PackedSequence`, whose class takes tensors alone."""

    fields: tuple[Any, ...]


def describe(tree: Any) -> Any:
    """Replace every tensor in a structure by its `TensorMeta`."""

    def say(x: Any) -> Any:
        if isinstance(x, PackedSequence):
            return Packed(tuple(say(field) for field in x))
        return TensorMeta(tuple(x.shape), tuple(x.stride()), x.dtype) if isinstance(x, Tensor) else x

    return tree_map(say, tree, is_leaf=_is_packed)


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedSequence)


def summon(tree: Any, device: torch.device, origin: str, unit: str | None = None) -> Any:
    """Replace every `TensorMeta` in a structure by a fresh Phantom on `device`; `unit`: what returned them."""
    if isinstance(tree, TensorMeta):
        phantom = Phantom(_meta_like(tree), device, origin)
        phantom.leaf = None if unit is None else (unit, 0)
        return phantom
    numbers = count()

    def make(x: Any) -> Any:
        if isinstance(x, Packed):
            return tuple.__new__(PackedSequence, tuple(make(field) for field in x.fields))
        if not isinstance(x, TensorMeta):
            return x
        phantom = Phantom(_meta_like(x), device, origin)
        phantom.leaf = None if unit is None else (unit, next(numbers))
        return phantom

    return tree_map(make, tree)


@lru_cache(maxsize=4096)
def _meta_like(x: TensorMeta) -> Tensor:
    return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")


def realize(
    phantom: Phantom, fetch: Callable[[Leaf], Tensor | None], noted: list[Phantom] | None = None
) -> Tensor | None:
    """The value of a Phantom, computed or fetched if it has none; None if that is not possible.

    Args:
        phantom: it is bound to the value.
        fetch: gives what a unit of another stage returned, or None.
        noted: takes every Phantom that is bound on the way.
    """
    if phantom.value is not None:
        return phantom.value if version_of(phantom.value) == phantom.version else None
    if any(leaf.spoilt for leaf in phantom.leaves or (phantom,)):
        return None
    value = _compute(phantom.recipe, fetch, noted) if phantom.recipe is not None else None
    if value is None and phantom.leaf is not None:
        value = fetch(phantom.leaf)
    if value is None or (value.shape, value.dtype) != (phantom.meta.shape, phantom.meta.dtype):
        return None
    phantom.bind(value)
    if noted is not None:
        noted.append(phantom)
    return value


def _compute(
    recipe: Recipe, fetch: Callable[[Leaf], Tensor | None], noted: list[Phantom] | None = None
) -> Tensor | None:
    sources = phantoms_in((recipe.args, recipe.kwargs))
    if not recipe.holds() or any(realize(source, fetch, noted) is None for source in sources):
        return None
    args, kwargs = with_values((recipe.args, recipe.kwargs))
    with torch.set_grad_enabled(recipe.grad):
        result = recipe.func(*args, **kwargs)
    return result if recipe.index is None else result[recipe.index]
