"""`schedule="auto"`: the schedule with the shortest step for what this model costs on this device.

The one idea: every unit is timed alone on one rank, which knows by that what a rank's share of the model costs; all
generators are then simulated with it, and the best is told to all ranks, with the reason in words. The shares are taken
to be equal. Left out: schedules that hold the weights twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline import schedules
from lightning_parallel.pipeline.blocks import block_names, unit_names
from lightning_parallel.pipeline.choice import CANDIDATES, Choice, choose
from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.timing import Context, UnitCost, calls_on_shapes, unit_costs

_WHY = 'schedule="auto"'
_ROUND_TRIPS = 5


@dataclass(frozen=True)
class Wanted:
    """What a schedule is chosen for.

    Args:
        num_ranks: D.
        num_microbatches: M.
        blocks: see `lay_out`.
        memory_limit: bytes of activations that a rank may hold; None for no limit.
    """

    num_ranks: int
    num_microbatches: int
    blocks: str | Sequence[str] = "auto"
    memory_limit: float | None = None


def choose_together(
    model: nn.Module,
    wanted: Wanted,
    device: torch.device,
    pair: Sequence[int],
    broadcast: Callable[[Any], Any],
    context: Context = nullcontext,
) -> Choice:
    """Measure on one rank, choose, and tell everybody; all ranks call it.

    Args:
        model: real or on the meta device, with an ``example_input_array`` of a micro-batch.
        wanted: what is chosen for.
        device: of this rank.
        pair: the global rank that measures and, if there are several, one to which it times transfers.
        broadcast: gives every rank the measuring rank's object.
        context: what forwards run in, such as autocast.

    Raises:
        ValueError: there is no ``example_input_array``, it does not run, or nothing fits the limit.
    """
    rank = dist.get_rank() if dist.is_initialized() else pair[0]
    told: Choice | str | None = None
    cause: Exception | None = None
    if rank == pair[0]:
        total, nbytes, hop = UnitCost(), 0, 0.0
        try:
            names = unit_names(model, wanted.num_ranks, wanted.blocks)
            total = sum(unit_costs(model, names, device, _WHY, context).values(), UnitCost())
            nbytes = _boundary_bytes(model, wanted)
        except Exception as error:
            cause = error
        if len(pair) > 1:
            hop = _hop(pair[1], nbytes, device)
        if cause is not None:
            told = f"{_WHY} could not time {type(model).__name__}: {cause}"
        else:
            try:
                told = choose_for(model, wanted, total, hop)
            except ValueError as error:
                cause, told = error, f"{_WHY} found no schedule: {error}"
    elif len(pair) > 1 and rank == pair[1]:
        _answer(pair[0], device)
    told = broadcast(told)
    if isinstance(told, str):
        raise ValueError(told) from cause
    assert told is not None
    return told


def choose_for(model: nn.Module, wanted: Wanted, total: UnitCost, hop: float) -> Choice:
    """The best schedule where the whole model costs `total` a micro-batch, and a transfer `hop` seconds.

    Raises:
        ValueError: nothing fits the limit.
    """
    ranks, share, limit = wanted.num_ranks, total.saved / wanted.num_ranks, wanted.memory_limit
    times = (total.forward / ranks, total.input_grad / ranks, total.weight_grad / ranks, total.backward / ranks)
    return choose(
        ranks,
        wanted.num_microbatches,
        Costs(*times, communication=hop),
        memory_limit=None if limit is None or not share else limit / share,
        weight_share=total.waiting / total.saved if total.saved else 1.0,
        candidates=[name for name in CANDIDATES if _fits(name, model, wanted)],
    )


def _answer(asker: int, device: torch.device) -> None:
    """The other end of `_hop`."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, asker)
    if size:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
        for _ in range(_ROUND_TRIPS + 1):
            dist.recv(buffer, asker)
            dist.send(buffer, asker)


def _hop(neighbour: int, nbytes: int, device: torch.device) -> float:
    """Seconds that so many bytes take to another rank: half of a round trip. None take no time."""
    dist.send(torch.tensor([nbytes]), neighbour)
    if not nbytes:
        return 0.0
    buffer, times = torch.zeros(nbytes, dtype=torch.uint8, device=device), []
    for _ in range(_ROUND_TRIPS + 1):
        began = time.perf_counter()
        dist.send(buffer, neighbour)
        dist.recv(buffer, neighbour)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:]) / 2


def _boundary_bytes(model: nn.Module, wanted: Wanted) -> int:
    """What the block in the middle is called with."""
    names = block_names(model, wanted.num_ranks, wanted.blocks)
    calls = calls_on_shapes(model, [names[len(names) // 2]], _WHY)
    leaves = [
        x for of in calls.values() for x in tree_flatten(of)[0] if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return max(1, sum(x.numel() * x.element_size() for x in leaves))


def _fits(name: str, model: nn.Module, wanted: Wanted) -> bool:
    """Whether there are blocks enough for its stages."""
    try:
        num_stages = schedules.make(name, wanted.num_ranks, wanted.num_microbatches).num_stages
    except ValueError:
        return False
    return len(block_names(model, num_stages, wanted.blocks)) >= num_stages
