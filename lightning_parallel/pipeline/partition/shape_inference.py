"""A model's forward on shapes alone: what each of its units is called with, and what it returns.

The one idea: a copy on the meta device runs ``example_input_array`` there, without memory and without its numbers. Left
out: forwards that branch on numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments, mostly on the meta device


def calls_on_shapes(model: nn.Module, names: Sequence[str], why: str) -> dict[str, list[Call]]:
    """The arguments of every call of the named modules in a forward of ``example_input_array`` on the meta device.

    Raises:
        ValueError: the model has no ``example_input_array``; ``why`` says what asks for it.
    """
    return _seen_on_shapes(model, names, why, lambda args, kwargs, result: (args, kwargs))


def results_on_shapes(model: nn.Module, names: Sequence[str], why: str) -> dict[str, list[Any]]:
    """What every call of the named modules returns in a forward of ``example_input_array``, on the meta device.

    Raises:
        ValueError: the model has no ``example_input_array``; ``why`` says what asks for it.
    """
    return _seen_on_shapes(model, names, why, lambda args, kwargs, result: result)


def _seen_on_shapes(
    model: nn.Module, names: Sequence[str], why: str, take: Callable[[Any, Any, Any], Any]
) -> dict[str, list[Any]]:
    shadow, (args, kwargs) = shadow_of(model, why)
    seen: dict[str, list[Any]] = {}
    for name in names:

        def note(module: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
            seen.setdefault(name, []).append(take(args, kwargs, result))

        shadow.get_submodule(name).register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        shadow(*args, **kwargs)
    return seen


def shadow_of(model: nn.Module, why: str) -> tuple[nn.Module, Call]:
    """A copy of the model on the meta device, and its ``example_input_array`` there.

    Raises:
        ValueError: it has none; ``why`` says what asks for it.
    """
    call = tree_map_only(Tensor, lambda t: t.to("meta"), example_of(model, why))
    in_memory = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(x): _on_meta(x) for x in in_memory}), call


def example_of(model: nn.Module, why: str) -> Call:
    """The arguments that a model's ``example_input_array`` stands for.

    Raises:
        ValueError: it has none; ``why`` says what asks for it.
    """
    example = getattr(model, "example_input_array", None)
    if example is None:
        raise ValueError(
            f"{why} runs {type(model).__name__}.forward once on shapes alone and needs its example_input_array. Set"
            ' self.example_input_array (a micro-batch), or do without: name a schedule, and use partition="parameters",'
            ' "count" or a list of blocks a stage.'
        )
    if isinstance(example, dict):
        return (), example
    return example if isinstance(example, tuple) else (example,), {}


def _on_meta(x: Tensor) -> Tensor:
    """The same without memory; a copy of the model takes it in place of the original."""
    meta = x.detach().to("meta")
    return nn.Parameter(meta, x.requires_grad) if isinstance(x, nn.Parameter) else meta
