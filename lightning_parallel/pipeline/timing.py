"""Seconds that each unit of a model takes for a forward and a backward, measured one unit at a time.

The one idea: the model's forward runs once on shapes alone, which tells what each unit is called with. Then one unit of
every kind (class, parameter shapes, argument shapes) is given memory on the device, alone, and timed on made-up values.
So a model that fits on no single device can be timed on one. Left out: what a unit's time owes to its values.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

_WARM_UPS, _REPEATS = 2, 5

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments on the meta device
Context = Callable[[], AbstractContextManager[Any]]


def unit_seconds(
    model: nn.Module, names: Sequence[str], device: torch.device, context: Context = nullcontext
) -> dict[str, float]:
    """Time of a forward and a backward of each unit, seconds, measured on a device.

    Args:
        model: real or on the meta device, with an ``example_input_array`` of a micro-batch.
        names: of the units.
        device: where they are timed.
        context: what forwards run in, such as autocast.

    Raises:
        ValueError: the model has no ``example_input_array``.
    """
    calls, known = calls_on_shapes(model, names, 'partition="time"'), dict[Hashable, float]()
    seconds = {}
    for name in names:
        module = model.get_submodule(name)
        kinds = [_kind(module, call) for call in calls.get(name, [])]
        for kind, call in zip(kinds, calls.get(name, []), strict=True):
            if kind not in known:
                known[kind] = _measure(module, call, device, context)
        seconds[name] = sum(known[kind] for kind in kinds)
    return seconds


def calls_on_shapes(model: nn.Module, names: Sequence[str], why: str) -> dict[str, list[Call]]:
    """The arguments of every call of the named modules in a forward of ``example_input_array`` on the meta device.

    Raises:
        ValueError: the model has no ``example_input_array``; ``why`` says what asks for it.
    """
    shadow, (args, kwargs) = shadow_of(model, why)
    calls: dict[str, list[Call]] = {}
    for name in names:

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            calls.setdefault(name, []).append((args, kwargs))

        shadow.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        shadow(*args, **kwargs)
    return calls


def shadow_of(model: nn.Module, why: str) -> tuple[nn.Module, Call]:
    """A copy of the model on the meta device, and its ``example_input_array`` there.

    Raises:
        ValueError: it has none; ``why`` says what asks for it.
    """
    example = getattr(model, "example_input_array", None)
    if example is None:
        raise ValueError(
            f"{why} runs {type(model).__name__}.forward once on shapes alone and needs its example_input_array. Set"
            ' self.example_input_array, or use partition="parameters", "count" or a list of blocks a stage.'
        )
    inputs = tree_map_only(Tensor, lambda t: t.to("meta"), example)
    call = ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    return copy.deepcopy(model).to("meta"), call


def _kind(module: nn.Module, call: Call) -> Hashable:
    """Modules and calls of one kind take one time."""
    shapes = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())
    leaves = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in tree_flatten(call)[0])
    return type(module), module.extra_repr(), shapes, leaves


def _measure(module: nn.Module, call: Call, device: torch.device, context: Context) -> float:
    """Median time of a forward and a backward of a copy of the module."""
    with _random_numbers_kept(device):
        unit = _alone(module, device)
        args, kwargs = tree_map_only(Tensor, lambda t: _made_up(t, device), call)
        times = [_once(unit, args, kwargs, device, context) for _ in range(_WARM_UPS + _REPEATS)]
    return median(times[_WARM_UPS:])


def _once(unit: nn.Module, args: Any, kwargs: Any, device: torch.device, context: Context) -> float:
    with torch.enable_grad():
        _wait(device)
        began = time.perf_counter()
        with context():
            result = unit(*args, **kwargs)
        made = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward(made, [torch.ones_like(x) for x in made])
        _wait(device)
    unit.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def _alone(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module on the device; parameters without memory get some."""
    unit = copy.deepcopy(module)
    if any(p.is_meta for p in unit.parameters()):
        buffers = {name: b.to(device) for name, b in unit.named_buffers() if not b.is_meta}
        unit.to_empty(device=device)
        with torch.no_grad():
            for parameter in unit.parameters():
                parameter.normal_(std=0.02) if parameter.is_floating_point() else parameter.zero_()
            for name, buffer in buffers.items():
                unit.get_buffer(name).copy_(buffer)
    return unit.to(device)


def _made_up(meta: Tensor, device: torch.device) -> Tensor:
    """Numbers for an argument: noise that asks for a gradient, the first class of any index, a mask of ones."""
    if meta.is_floating_point():
        return torch.randn(meta.shape, dtype=meta.dtype, device=device, requires_grad=True)
    make = torch.ones if meta.dtype == torch.bool else torch.zeros
    return make(meta.shape, dtype=meta.dtype, device=device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
