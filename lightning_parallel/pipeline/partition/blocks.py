"""Which modules of a model are its blocks, and which are the other units.

The one idea: a model is cut between *blocks*, the longest chain of repeated submodules. Everything else that holds
parameters is a *unit*.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def unit_names(model: nn.Module, num_stages: int, blocks: str | Sequence[str] = "auto") -> list[str]:
    """The names of all units, in order of registration; see `lay_out`."""
    return [name for name, _ in collect(model, block_names(model, num_stages, blocks))]


def block_names(model: nn.Module, num_stages: int, blocks: str | Sequence[str] = "auto") -> list[str]:
    """The names of the blocks of the chain that is cut; see `lay_out`."""
    return find_blocks(model, num_stages) if blocks == "auto" else _named_blocks(model, blocks)


def find_blocks(model: nn.Module, num_stages: int) -> list[str]:
    """Names of the blocks: the children of the ModuleList or Sequential with most parameters that has enough children.

    Without such a container, the children of the model itself (descending while there is a single child), with those of
    lists and dictionaries in their place; where they are too few, those of an ``nn.Sequential`` too.
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
    names = _opened(module, (nn.ModuleList, nn.ModuleDict))  # which nobody calls
    if len(names) < num_stages:
        names = _opened(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    return [f"{prefix}{name}" for name in names] or ([prefix[:-1]] if prefix else [])


def _parametric_children(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if next(child.parameters(), None) is not None]


def _opened(module: nn.Module, containers: tuple[type[nn.Module], ...]) -> list[str]:
    """Children with parameters, the children of containers in place of them."""
    found = []
    for name in _parametric_children(module):
        child = module.get_submodule(name)
        inside = _opened(child, containers) if type(child) in containers else []
        found += [f"{name}.{of}" for of in inside] or [name]
    return found


def _named_blocks(model: nn.Module, blocks: str | Sequence[str]) -> list[str]:
    known = dict(model.named_modules())
    names = [blocks] if isinstance(blocks, str) else list(blocks)
    unknown = [name for name in names if name not in known]
    if unknown:
        containers = [n for n, m in known.items() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        raise ValueError(
            f"blocks= names {unknown}, which {type(model).__name__} does not have. Its containers: {containers}."
        )
    within = [(a, b) for a in names for b in names if b.startswith(f"{a}.")]
    if within:
        raise ValueError(
            f"blocks= names `{within[0][1]}`, which lies in `{within[0][0]}`, beside it. Name one of them."
        )
    if len(names) == 1 and isinstance(known[names[0]], (nn.ModuleList, nn.Sequential)):
        return [f"{names[0]}.{child}" if names[0] else child for child, _ in known[names[0]].named_children()]
    return names


def collect(model: nn.Module, blocks: Sequence[str]) -> list[tuple[str, int | None]]:
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
