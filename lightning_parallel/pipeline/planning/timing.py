"""What each unit of a model costs, measured one unit at a time: seconds of F, B, I and W, and bytes kept between them.

The one idea: the model's forward runs once on shapes alone, which tells what each unit is called with. Then one unit of
every kind (class, parameter shapes, argument shapes) is given memory on the device, alone, and timed on made-up values.
So a model that fits on no single device can be timed on one. Left out: what a unit's time owes to its values.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_parallel.pipeline.partition.shape_inference import Call, calls_on_shapes
from lightning_parallel.pipeline.weight_grad import WeightGradients, backward_inputs

WARM_UPS, REPEATS = 2, 5

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class UnitCost:
    """What a unit's calls in one micro-batch cost.

    Attributes:
        forward, backward, input_grad, weight_grad: seconds of F, of a whole B, and of I and W instead.
        saved: bytes of activations that F keeps for B.
        waiting: bytes of them that W needs.
    """

    forward: float = 0.0
    backward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    saved: float = 0.0
    waiting: float = 0.0

    def __add__(self, other: UnitCost) -> UnitCost:
        return UnitCost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def unit_costs(
    model: nn.Module, names: Sequence[str], device: torch.device, why: str, context: Context = nullcontext
) -> dict[str, UnitCost]:
    """Costs of each unit, measured on a device.

    Args:
        model: real or on the meta device, with an ``example_input_array`` of a micro-batch.
        names: of the units.
        device: where they are timed.
        why: what asks for it, for the message.
        context: what forwards run in, such as autocast.

    Raises:
        ValueError: the model has no ``example_input_array``.
    """
    calls, known = calls_on_shapes(model, names, why), dict[Hashable, UnitCost]()
    costs = {}
    for name in names:
        module, total = model.get_submodule(name), UnitCost()
        for call in calls.get(name, []):
            kind = _kind(module, call)
            if kind not in known:
                known[kind] = _measure(module, call, device, context)
            total += known[kind]
        costs[name] = total
    return costs


def _kind(module: nn.Module, call: Call) -> Hashable:
    """Modules and calls of one kind take one time."""
    shapes = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())
    leaves = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in tree_flatten(call)[0])
    return type(module), module.extra_repr(), shapes, leaves


def _measure(module: nn.Module, call: Call, device: torch.device, context: Context) -> UnitCost:
    """Median times of a copy of the module, and what it keeps."""
    with _random_numbers_kept(device), torch.enable_grad():
        unit = _alone(module, device)
        args, kwargs = tree_map_only(Tensor, lambda t: made_up(t, device), call)

        def forward() -> Sequence[Tensor]:
            with context():
                result = unit(*args, **kwargs)
            return [x for x in tree_flatten(result)[0] if isinstance(x, Tensor) and x.requires_grad]

        times = [_once(unit, forward, device) for _ in range(WARM_UPS + REPEATS)]
        saved, waiting = _bytes_kept(unit, forward)
    first, backward, input_grad, weight_grad = (median(column) for column in zip(*times[WARM_UPS:], strict=True))
    return UnitCost(first, backward, input_grad, weight_grad, saved, waiting)


def _once(unit: nn.Module, forward: Callable[[], Sequence[Tensor]], device: torch.device) -> list[float]:
    """Seconds of F, B, I and W. Gradients are there already, as they are for all micro-batches but the first."""
    timer = Timer(device)
    roots = forward()
    timer.lap()
    if roots:  # a frozen unit whose input asks for no gradient has nothing to back up
        torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
    timer.lap()
    roots = forward()
    timer.lap()
    weights = _inputs_backward(roots)
    timer.lap()
    weights.run(fused=True)
    timer.lap()
    first, backward, _, input_grad, weight_grad = timer.laps
    return [first, backward, input_grad, weight_grad]


def _bytes_kept(unit: nn.Module, forward: Callable[[], Sequence[Tensor]]) -> tuple[float, float]:
    """Bytes that a forward saves for the backward, and those of the factors of products that W needs.

    In two forwards: PyTorch 2.9 does not let the factors be read where hooks on saved tensors were.
    """
    known = {p.untyped_storage().data_ptr() for p in (*unit.parameters(), *unit.buffers())}
    saved: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(note, lambda x: x):
        kept = forward()
    del kept
    factors = [product.operands()[1].untyped_storage() for product in _inputs_backward(forward()).take()]
    waiting = {factor.data_ptr(): factor.nbytes() for factor in factors if factor.data_ptr() not in known}
    unit.zero_grad(set_to_none=True)
    return float(sum(saved.values())), float(sum(waiting.values()))


def _inputs_backward(roots: Sequence[Tensor]) -> WeightGradients:
    return backward_inputs(roots, [torch.ones_like(x) for x in roots]) if roots else WeightGradients()


class Timer:
    """Laps between moments at which the device has done all its work."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.laps = device, list[float]()
        self._began = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> None:
        now = self._now()
        self.laps.append(now - self._began)
        self._began = now


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


def made_up(meta: Tensor, device: torch.device) -> Tensor:
    """Numbers for an argument: noise that asks for a gradient, the first class of any index, a mask of ones."""
    if meta.is_floating_point():
        return torch.randn(meta.shape, dtype=meta.dtype, device=device, requires_grad=True)
    make = torch.ones if meta.dtype == torch.bool else torch.zeros
    return make(meta.shape, dtype=meta.dtype, device=device)


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
