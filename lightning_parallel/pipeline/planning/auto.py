"""`schedule="auto"`: the schedule with the shortest step for what this model costs on this device.

The one idea: every unit is timed alone on one rank, which so knows what the stages of any cut cost; every generator is
then simulated with the stages that it would have, as the pipeline will cut them, and with the times that their
boundaries take to a neighbour. The best is told to all ranks, with the reason in words. It is done before the first
step: a schedule says how many stages there are and where they lie, so another one later would move weights and
optimizer states between ranks. Left out: schedules that hold the weights twice; what a step does beside the model's
forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline import schedules
from lightning_parallel.pipeline.partition.blocks import block_names, unit_names
from lightning_parallel.pipeline.partition.layout import Partition
from lightning_parallel.pipeline.partition.shape_inference import Call, calls_on_shapes
from lightning_parallel.pipeline.planning.choice import CANDIDATES, Choice, choose
from lightning_parallel.pipeline.planning.loads import MeasuredLoads, Placement
from lightning_parallel.pipeline.planning.outside_costs import outside_costs
from lightning_parallel.pipeline.planning.timing import Context, unit_costs
from lightning_parallel.pipeline.schedule import Action

_WHY = 'schedule="auto"'
_ROUND_TRIPS = 5


@dataclass(frozen=True)
class Wanted:
    """What a schedule is chosen for.

    Args:
        num_ranks: D.
        num_microbatches: M.
        blocks, partition, stages: see `lay_out`.
        memory_limit: bytes of activations that a rank may hold; None for no limit.
    """

    num_ranks: int
    num_microbatches: int
    blocks: str | Sequence[str] = "auto"
    partition: Partition = "parameters"
    stages: Mapping[str, int] | None = None
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
    cause: BaseException | None = None
    if rank == pair[0]:
        try:
            with _neighbour(pair, device) as hop:
                told = choose_for(measure(model, wanted, device, hop, context), wanted)
        except _NotFound as error:
            cause, told = error.__cause__, f"{_WHY} found no schedule: {error}"
        except Exception as error:
            cause, told = error, f"{_WHY} could not time {type(model).__name__}: {error}"
    elif len(pair) > 1 and rank == pair[1]:
        _answer(pair[0], device)
    told = broadcast(told)
    if isinstance(told, str):
        raise ValueError(told) from cause
    assert told is not None
    return told


def measure(
    model: nn.Module,
    wanted: Wanted,
    device: torch.device,
    hop: Callable[[int], float],
    context: Context = nullcontext,
) -> MeasuredLoads:
    """Time the units of every cut that a candidate may ask for, alone, the forward without them, and transfers of all
    sizes between its stages.

    Raises:
        ValueError: there is no ``example_input_array``.
    """
    counts = [count for count in _counts(wanted) if len(block_names(model, count, wanted.blocks)) >= count]
    cuts = dict.fromkeys(tuple(unit_names(model, count, wanted.blocks)) for count in counts)
    names = list(dict.fromkeys(name for units in cuts for name in units))
    blocks = list(dict.fromkeys(name for count in counts for name in block_names(model, count, wanted.blocks)))
    units = unit_costs(model, names, device, _WHY, context)
    outside = {cut: outside_costs(model, cut, device, _WHY, context) for cut in cuts}
    calls = calls_on_shapes(model, blocks, _WHY)
    nbytes = {name: _nbytes(calls.get(name, [])) for name in blocks}
    seconds = lru_cache(maxsize=None)(hop)
    return MeasuredLoads(model, wanted.blocks, wanted.partition, wanted.stages, units, nbytes, seconds, outside)


def choose_for(loads: MeasuredLoads, wanted: Wanted) -> Choice:
    """The best schedule for stages that cost so.

    Raises:
        _NotFound: nothing fits the limit, or can be cut.
    """
    try:
        choice = choose(wanted.num_ranks, wanted.num_microbatches, loads, wanted.memory_limit)
    except ValueError as error:
        raise _NotFound(str(error)) from error
    reason = f"{choice.reason}; {_told(loads, choice.schedule.placement)}"
    return replace(choice, reason=reason, seconds=loads.seconds)


class _NotFound(Exception):
    """There is no schedule to choose."""


def _told(loads: MeasuredLoads, placement: Placement) -> str:
    """What the stages take, in words."""
    load = loads(placement)
    times = [sum(load.costs.of(Action(kind, s, 0)) for kind in ("F", "B")) for s in range(len(load.kept))]
    told = f"its stages take {min(times):g} to {max(times):g} forward and back"
    untold = loads.untold(len(load.kept))
    return told + (f", without what runs outside of units ({untold})" if untold else "")


def _counts(wanted: Wanted) -> list[int]:
    """How many stages candidates have."""
    found = set()
    for name in CANDIDATES:
        with suppress(ValueError):
            found.add(schedules.make(name, wanted.num_ranks, wanted.num_microbatches).num_stages)
    return sorted(found)


@contextmanager
def _neighbour(pair: Sequence[int], device: torch.device) -> Iterator[Callable[[int], float]]:
    """What times transfers to the second rank of a pair, which answers inside."""
    if len(pair) == 1:
        yield lambda nbytes: 0.0
        return
    try:
        yield lambda nbytes: _hop(pair[1], nbytes, device)
    finally:
        dist.send(torch.zeros(1, dtype=torch.int64), pair[1])


def _answer(asker: int, device: torch.device) -> None:
    """The other end of `_hop`, until no more is asked."""
    size = torch.zeros(1, dtype=torch.int64)
    while dist.recv(size, asker) is not None and size:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
        for _ in range(_ROUND_TRIPS + 1):
            dist.recv(buffer, asker)
            dist.send(buffer, asker)


def _hop(neighbour: int, nbytes: int, device: torch.device) -> float:
    """Seconds that so many bytes take to another rank: half of a round trip."""
    dist.send(torch.tensor([nbytes]), neighbour)
    buffer, times = torch.zeros(nbytes, dtype=torch.uint8, device=device), []
    for _ in range(_ROUND_TRIPS + 1):
        began = time.perf_counter()
        dist.send(buffer, neighbour)
        dist.recv(buffer, neighbour)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:]) / 2


def _nbytes(calls: Sequence[Call]) -> int:
    """What a block is called with, at least 1."""
    leaves = [x for x in tree_flatten(calls)[0] if isinstance(x, Tensor) and x.is_floating_point()]
    return max(1, sum(x.numel() * x.element_size() for x in leaves))
