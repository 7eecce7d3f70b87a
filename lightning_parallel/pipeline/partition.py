"""Where to cut: which modules of a model are its blocks, and which stage every module belongs to.

The one idea: a model is cut between *blocks*, the longest chain of repeated submodules. Everything else that holds
parameters is a *unit* and goes with its neighbours in the order of registration: before the blocks to the first stage,
after them to the last. Contiguous runs of blocks are dealt to stages so that the dearest stage is as cheap as possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from lightning_parallel.pipeline.compiled import refuse_compiled_around
from lightning_parallel.pipeline.timing import shadow_of

PARTITIONS = ("parameters", "count", "flops", "time")
Partition = Literal["parameters", "count", "flops", "time"] | Sequence[int]


@dataclass(frozen=True)
class Unit:
    """A module that runs whole on one stage. `block` is its place in the chain, None outside the chain."""

    name: str
    stage: int
    block: int | None


@dataclass(frozen=True)
class Layout:
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
) -> Layout:
    """Deal the modules of a model to stages.

    Args:
        model: the module whose blocks are cut.
        num_stages: how many stages, at most the number of blocks.
        blocks: "auto", the name of a container whose children are the blocks, or the blocks' names in execution order.
        partition: "parameters", "flops" or "time" balance the stages by them, "count" by blocks; a list gives blocks a
            stage.
        stages: overrides for units outside the chain, {name: stage}; negative stages count from the last.
        seconds: time of every unit, for partition="time"; see `unit_names` and `timing.unit_seconds`.

    Raises:
        ValueError: there are fewer blocks than stages, a name is unknown, or a list does not sum to the blocks.
    """
    names = block_names(model, num_stages, blocks)
    if len(names) < num_stages:
        raise ValueError(
            f"A pipeline of {num_stages} stages needs at least {num_stages} blocks, but {type(model).__name__} has"
            f" {len(names)} ({', '.join(names) or 'none'}). Use fewer devices, or name the blocks with"
            ' blocks="path.to.container" or blocks=["first", "second", ...].'
        )
    found = _collect(model, names)
    refuse_compiled_around(model, [name for name, _ in found])
    first = next(i for i, (_, block) in enumerate(found) if block is not None)
    costs = _costs(model, found, len(names), first, partition, seconds)
    bounds = _bounds(costs, num_stages, partition)
    layout = Layout((), tuple(bounds))
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
    return Layout(tuple(units), tuple(bounds), tuple(sum(costs[a:b]) / total for a, b in pairwise(bounds)))


def unit_names(model: nn.Module, num_stages: int, blocks: str | Sequence[str] = "auto") -> list[str]:
    """The names of all units, in order of registration; see `lay_out`."""
    return [name for name, _ in _collect(model, block_names(model, num_stages, blocks))]


def block_names(model: nn.Module, num_stages: int, blocks: str | Sequence[str] = "auto") -> list[str]:
    """The names of the blocks of the chain that is cut; see `lay_out`."""
    return find_blocks(model, num_stages) if blocks == "auto" else _named_blocks(model, blocks)


def _override(name: str, stage: int, block: int | None, num_stages: int) -> int:
    if block is not None:
        raise ValueError(
            f"stages= moves `{name}`, which is block {block} of the chain. Use partition=[...] for blocks."
        )
    if not -num_stages <= stage < num_stages:
        raise ValueError(f"stages= puts `{name}` on stage {stage}, but the stages are 0 to {num_stages - 1}.")
    return stage % num_stages


def find_blocks(model: nn.Module, num_stages: int) -> list[str]:
    """Names of the blocks: the children of the ModuleList or Sequential with most parameters that has enough children.

    Without such a container, the children of the model itself (descending while there is a single child).
    """
    best: tuple[int, int, list[str]] = (0, 0, [])
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= max(num_stages, 2):
            size = sum(p.numel() for p in module.parameters())
            prefix = f"{name}." if name else ""
            best = max(best, (size, -name.count("."), [f"{prefix}{child}" for child, _ in module.named_children()]))
    if best[0]:
        return best[2]
    prefix, module = "", model
    children = _parametric_children(module)
    while len(children) == 1:
        prefix, module = f"{prefix}{children[0]}.", getattr(module, children[0])
        children = _parametric_children(module)
    return [f"{prefix}{child}" for child in children] or ([prefix[:-1]] if prefix else [])


def _parametric_children(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if next(child.parameters(), None) is not None]


def _named_blocks(model: nn.Module, blocks: str | Sequence[str]) -> list[str]:
    known = dict(model.named_modules())
    names = [blocks] if isinstance(blocks, str) else list(blocks)
    unknown = [name for name in names if name not in known]
    if unknown:
        containers = [n for n, m in known.items() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        raise ValueError(
            f"blocks= names {unknown}, which {type(model).__name__} does not have. Its containers: {containers}."
        )
    if len(names) == 1 and isinstance(known[names[0]], (nn.ModuleList, nn.Sequential)):
        return [f"{names[0]}.{child}" if names[0] else child for child, _ in known[names[0]].named_children()]
    return names


def _collect(model: nn.Module, blocks: Sequence[str]) -> list[tuple[str, int | None]]:
    """Every unit with its place in the chain, in order of registration; containers of blocks are looked into.

    A module that is registered under several names is one unit: a block, or what was registered first.
    """
    index = {name: i for i, name in enumerate(blocks)}
    units: list[tuple[str, int | None]] = []
    seen = {id(model.get_submodule(name)) for name in blocks}

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = prefix + child_name
            if name in index:
                units.append((name, index[name]))
            elif id(child) in seen:
                continue
            elif isinstance(child, (nn.ParameterList, nn.ParameterDict)):
                continue  # bare parameters, held by every stage
            elif any(block.startswith(f"{name}.") for block in blocks) or type(child) in (nn.ModuleList, nn.ModuleDict):
                visit(child, f"{name}.")
            elif next(child.parameters(), None) is not None:
                seen.add(id(child))
                units.append((name, None))

    visit(model, "")
    return units


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
        assert seconds is not None, "measured by whoever knows a device"
        of = dict(seconds)
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
