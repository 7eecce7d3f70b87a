"""How a Phantom was computed: noted when it is, so that a stage that needs it after all can compute it.

The one idea: what comes of units' results and of real tensors can be computed again, as long as nobody wrote into these
and no random numbers were drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.phantoms.stand_in import Recipe, StandIn, version_of


class _Draws:
    """Counts operators that draw random numbers: what they give cannot be computed again."""

    count = 0


draws = _Draws()


def recipe_of(func: Callable, args: Any, kwargs: Any) -> Recipe:
    """The recipe of a call that is about to be made."""
    tensors: list[tuple[Tensor, int]] = []
    args, kwargs = _kept(args, tensors), _kept(kwargs, tensors)
    return Recipe(func, args, kwargs, tensors, torch.is_grad_enabled(), draws.count)


def remember(recipe: Recipe, sources: Sequence[StandIn], result: Any) -> None:
    """Note on every new Phantom of a result how it was computed, if it can be: from units' results, without drawing."""
    again = draws.count == recipe.draws and all(source.leaf or source.recipe for source in sources)
    parts = [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else []
    leaves = tuple({id(leaf): leaf for source in sources for leaf in source.leaves or (source,)}.values())
    for index, part in enumerate(parts):
        if isinstance(part, StandIn) and not any(part is source for source in sources):
            part.recipe = replace(recipe, index=None if part is result else index) if again else None
            part.leaves = leaves


def _kept(tree: Any, tensors: list[tuple[Tensor, int]]) -> Any:
    """Arguments that nobody changes later: containers copied, tensors noted."""
    if isinstance(tree, Tensor):
        if not isinstance(tree, StandIn):
            tensors.append((tree, version_of(tree)))
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(_kept(x, tensors) for x in tree)
    if type(tree) is dict:
        return {key: _kept(x, tensors) for key, x in tree.items()}
    return tree
