"""What a forward costs outside of units: between two of them, before the first and behind the last.

The one idea: the model's forward runs on the device with stand-ins for its units, which return made-up values of the
right shapes at once. What is left is the model's own code: masks, positions, sums between units, what is done with the
head's result, and the loss where the forward computes it. Left out: what only a training step does, and what a forward
reads of its units beside their results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_parallel.pipeline.partition.shape_inference import example_of, results_on_shapes, shadow_of
from lightning_parallel.pipeline.planning.timing import REPEATS, WARM_UPS, Context, Timer, UnitCost, made_up
from lightning_parallel.pipeline.stage.random_streams import RandomStreams


@dataclass(frozen=True)
class OutsideCosts:
    """What a forward costs outside of units.

    Args:
        before: up to the first unit, which every stage computes.
        behind: from the end of a unit's calls to the next unit's, by the unit's name.
        untold: why it is not known; empty where it is.
    """

    before: UnitCost = field(default_factory=UnitCost)
    behind: Mapping[str, UnitCost] = field(default_factory=dict)
    untold: str = ""


def outside_costs(
    model: nn.Module, names: Sequence[str], device: torch.device, why: str, context: Context = nullcontext
) -> OutsideCosts:
    """Costs of a forward of ``example_input_array`` without its units, measured on a device.

    Args:
        model: real or on the meta device, with an ``example_input_array`` of a micro-batch.
        names: of the units, none inside another.
        device, why, context: see `unit_costs`.
    """
    try:
        with RandomStreams(0, device).step():
            return _measured(model, names, device, why, context)
    except Exception as error:  # the model's own code may want more of its units than stand-ins have
        return OutsideCosts(untold=f"{type(error).__name__}: {error}")


def _measured(model: nn.Module, names: Sequence[str], device: torch.device, why: str, context: Context) -> OutsideCosts:
    results = results_on_shapes(model, names, why)
    shadow, _ = shadow_of(model, why)
    runs = StandIns(shadow, results, device, context)
    _give_memory(shadow, model, names, device)
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().to(device), example_of(model, why))
    with torch.enable_grad():
        times = [runs.run(args, kwargs) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:]
        kept = runs.bytes_kept(args, kwargs)
    before, behind = UnitCost(), dict[str, UnitCost]()
    for number, name in enumerate(runs.order):
        forward, backward = (median(run[number][kind] for run in times) for kind in (0, 1))
        cost = UnitCost(forward, backward, input_grad=backward, saved=kept[number])
        if name is None:
            before += cost
        else:
            behind[name] = behind.get(name, UnitCost()) + cost
    return OutsideCosts(before, behind)


class StandIns:
    """A model whose units return made-up values.

    Args:
        model: a copy whose units need no memory.
        results: what each unit's calls return, on the meta device.
        device, context: where and in what forwards run.

    Attributes:
        order: behind which unit each piece of the newest run began, None for the first.
    """

    def __init__(
        self, model: nn.Module, results: Mapping[str, Sequence[Any]], device: torch.device, context: Context
    ) -> None:
        self.model, self.results, self._device, self._context = model, results, device, context
        self.order: list[str | None] = []
        self._pieces: list[tuple[float, float]] = []
        for name in results:
            model.get_submodule(name).forward = self._stand_in(name)

    def run(self, args: Any, kwargs: Any) -> list[tuple[float, float]]:
        """Seconds of the forward and the backward of each piece."""
        self.order, self._pieces, self._calls = [None], [], Counter[str]()
        self._done: set[Any] = {None}  # nodes that a backward began at; None: what needs none
        with self._context():
            self._timer = Timer(self._device)
            self._end(self.model(*args, **kwargs))
        return self._pieces

    def bytes_kept(self, args: Any, kwargs: Any) -> list[float]:
        """Bytes that the forward of each piece saves for its backward."""
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in (*given, *self.model.parameters(), *self.model.buffers())}
        kept: dict[tuple[int, int], int] = {}

        def note(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in known:
                kept[len(self._pieces), storage.data_ptr()] = storage.nbytes()
            return x

        with saved_tensors_hooks(note, lambda x: x):
            self.run(args, kwargs)
        found = [0.0] * len(self._pieces)
        for (piece, _), nbytes in kept.items():
            found[piece] += nbytes
        return found

    def _stand_in(self, name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._end((args, kwargs))
            result = self.results[name][self._calls[name]]
            self._calls[name] += 1
            self.order.append(name)
            made = tree_map_only(Tensor, lambda x: made_up(x, self._device), result)
            self._timer.lap()
            return made

        return forward

    def _end(self, made: Any) -> None:
        """A piece is over: back up what it made, and note both times."""
        self._timer.lap()
        roots = [x for x in tree_flatten(made)[0] if isinstance(x, Tensor) and x.grad_fn not in self._done]
        self._done.update(x.grad_fn for x in roots)
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(x) for x in roots], retain_graph=True)
        self._timer.lap()
        forward, backward = self._timer.laps[-2:]
        self._pieces.append((forward, backward))


def _give_memory(shadow: nn.Module, model: nn.Module, names: Sequence[str], device: torch.device) -> None:
    """What lies outside of units is on the device in the copy, with the model's values."""
    inside = tuple(f"{name}." for name in names)
    for name, module in shadow.named_modules():
        if f"{name}.".startswith(inside):
            continue
        original = model.get_submodule(name)
        for own, of in ((module._buffers, original._buffers), (module._parameters, original._parameters)):
            for key, x in of.items():
                if x is not None:
                    value = x.detach().to(device) if not x.is_meta else made_up(x, device).detach()
                    own[key] = nn.Parameter(value, x.requires_grad) if isinstance(x, nn.Parameter) else value
