"""Where to cut: which stage every unit of a model belongs to.

The one idea: a model is cut between blocks (``blocks.py``). Every other unit goes with its neighbours in the order of
registration: before the blocks to the first stage, after them to the last. Contiguous runs of blocks are dealt to
stages so that the dearest stage is as cheap as possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from lightning_parallel.pipeline.partition.blocks import block_names, collect
from lightning_parallel.pipeline.partition.compiled import refuse_compiled_around
from lightning_parallel.pipeline.partition.shape_inference import shadow_of

PARTITIONS = ("parameters", "count", "flops", "time")
Partition = Literal["parameters", "count", "flops", "time"] | Sequence[int]


@dataclass(frozen=True)
class Unit:
    """A module that runs whole on one stage. `block` is its place in the chain, None outside the chain."""

    name: str
    stage: int
    block: int | None


@dataclass(frozen=True)
class StageLayout:
    """Which unit belongs to which stage, and where the stages begin.

    Attributes:
        units: every unit, in order of registration.
        bounds: num_stages + 1 indices into the chain; stage s holds blocks bounds[s] .. bounds[s + 1] - 1.
        shares: of each stage in what the partition balances, summing to 1.
    """

    units: tuple[Unit, ...]
    bounds: tuple[int, ...]
    shares: tuple[float, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    def stage_of(self, block: int) -> int:
        return next(s for s in range(self.num_stages) if block < self.bounds[s + 1])


def lay_out(
    model: nn.Module,
    num_stages: int,
    blocks: str | Sequence[str] = "auto",
    partition: Partition = "parameters",
    stages: Mapping[str, int] | None = None,
    seconds: Mapping[str, float] | None = None,
    num_ranks: int | None = None,
) -> StageLayout:
    """Deal the modules of a model to stages.

    Args:
        model: the module whose blocks are cut.
        num_stages: how many stages, at most the number of blocks.
        blocks: "auto", the name of a container whose children are the blocks, or the blocks' names in execution order.
        partition: "parameters", "flops" or "time" balance the stages by them, "count" by blocks; a list gives blocks a
            stage.
        stages: overrides for units outside the chain, {name: stage}; negative stages count from the last.
        seconds: time of every unit, for partition="time"; see `unit_names` and `timing.unit_seconds`.
        num_ranks: that share the stages; None: one each. It is for the message.

    Raises:
        ValueError: there are fewer blocks than stages (one stage needs none), a name is unknown, or a list does not sum
            to the blocks.
    """
    names = block_names(model, num_stages, blocks)
    if len(names) < num_stages and num_stages > 1:
        raise ValueError(_too_few(model, num_stages, num_ranks or num_stages, names, blocks))
    found = collect(model, names)
    refuse_compiled_around(model, [name for name, _ in found])
    first = next((i for i, (_, block) in enumerate(found) if block is not None), 0)
    costs = _costs(model, found, len(names), first, partition, seconds)
    bounds = _bounds(costs, num_stages, partition)
    layout = StageLayout((), tuple(bounds))
    overrides = dict(stages or {})
    units = []
    for i, (name, block) in enumerate(found):
        stage = layout.stage_of(block) if block is not None else (0 if i < first else num_stages - 1)
        if name in overrides:
            stage = _override(name, overrides.pop(name), block, num_stages)
        units.append(Unit(name, stage, block))
    if overrides:
        raise ValueError(
            f"stages= names {sorted(overrides)}, which are not units. The units: {[u.name for u in units]}."
        )
    total = sum(costs) or 1.0
    return StageLayout(tuple(units), tuple(bounds), tuple(sum(costs[a:b]) / total for a, b in pairwise(bounds)))


def _too_few(
    model: nn.Module, num_stages: int, num_ranks: int, names: Sequence[str], blocks: str | Sequence[str]
) -> str:
    """What is said of a model with fewer blocks than stages: what suffices with these blocks, and how to name more."""
    each = num_stages // num_ranks
    instead = []
    if each > 1 and max(1, len(block_names(model, num_ranks, blocks))) >= num_ranks:
        instead.append('schedule="1f1b", which has one stage a rank')
    if num_ranks > 1:
        most = max(1, len(names) // each)
        instead.append(f"a pipeline of {most} rank{'s' if most > 1 else ''} (fewer devices)")
    instead.append('name more blocks with blocks="path.to.container" or blocks=["first", "second", ...]')
    held = f" ({each} on each rank)" if each > 1 else ""
    return (
        f"A pipeline of {num_stages} stages{held} needs at least {num_stages} blocks, but {type(model).__name__} has"
        f" {len(names)} ({', '.join(names) or 'none'}). Use {', or '.join(instead)}."
    )


def _override(name: str, stage: int, block: int | None, num_stages: int) -> int:
    if block is not None:
        raise ValueError(
            f"stages= moves `{name}`, which is block {block} of the chain. Use partition=[...] for blocks."
        )
    if not -num_stages <= stage < num_stages:
        raise ValueError(f"stages= puts `{name}` on stage {stage}, but the stages are 0 to {num_stages - 1}.")
    return stage % num_stages


def _costs(
    model: nn.Module,
    found: Sequence[tuple[str, int | None]],
    num_blocks: int,
    first: int,
    partition: Partition,
    seconds: Mapping[str, float] | None,
) -> list[float]:
    """Cost of each block; units outside the chain weigh with the first or the last block."""
    if partition == "time":
        assert seconds is not None or not found, "measured by whoever knows a device"
        of = dict(seconds or {})
    elif partition == "flops":
        of = _flops(model, [name for name, _ in found])
    elif partition == "parameters":
        of = {name: float(sum(p.numel() for p in model.get_submodule(name).parameters())) for name, _ in found}
    else:
        return [1.0] * num_blocks
    costs = [0.0] * num_blocks
    for i, (name, block) in enumerate(found):
        costs[block if block is not None else (0 if i < first else num_blocks - 1)] += of[name]
    return costs


def _flops(model: nn.Module, names: Sequence[str]) -> dict[str, float]:
    """Floating-point operations of each module in one forward of the model's `example_input_array`, counted on meta."""
    from torch.utils.flop_counter import FlopCounterMode

    shadow, (args, kwargs) = shadow_of(model, 'partition="flops"')
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        shadow(*args, **kwargs)
    counts = {module.split(".", 1)[-1]: sum(ops.values()) for module, ops in counter.get_flop_counts().items()}
    return {name: float(counts.get(name, 0)) for name in names}


def _bounds(costs: Sequence[float], num_stages: int, partition: Partition) -> list[int]:
    if not isinstance(partition, str):
        sizes = list(partition)
        if len(sizes) != num_stages or sum(sizes) != len(costs) or min(sizes) < 1:
            raise ValueError(
                f"partition={sizes} must give each of {num_stages} stages at least one block and sum to {len(costs)}"
                " blocks."
            )
        return [sum(sizes[:s]) for s in range(num_stages + 1)]
    if partition not in PARTITIONS:
        raise ValueError(
            f'partition={partition!r}: use "parameters", "count", "flops", "time" or a list of blocks a stage.'
        )
    return min_max_cut(costs, num_stages)


def min_max_cut(costs: Sequence[float], num_parts: int) -> list[int]:
    """Cut a chain into contiguous non-empty parts so that the dearest part is as cheap as possible (exact).

    Among the cuts with that cost the most even one is taken: the sum of squared part costs is least.

    Example:
        >>> min_max_cut([1, 1, 1, 3], 2)
        [0, 3, 4]
    """
    n = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    inf = float("inf")
    best: list[list[tuple[float, float, int]]] = [[(inf, inf, 0)] * (n + 1) for _ in range(num_parts + 1)]
    best[0][0] = (0.0, 0.0, 0)
    for part in range(1, num_parts + 1):
        for end in range(part, n + 1):
            best[part][end] = min(
                (
                    max(best[part - 1][start][0], cost := total[end] - total[start]),
                    best[part - 1][start][1] + cost * cost,
                    start,
                )
                for start in range(part - 1, end)
            )
    bounds = [n]
    for part in range(num_parts, 0, -1):
        bounds.append(best[part][bounds[-1]][2])
    return bounds[::-1]
