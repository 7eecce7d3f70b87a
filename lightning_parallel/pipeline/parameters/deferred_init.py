"""Modules that are built without memory, on the meta device, and get it on the rank that keeps them.

The one idea: a parameter's initial values follow from a seed and its module's number in the model, so that they are the
same whoever makes them, and in whatever order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from lightning_parallel.checkpoint.weights import Part, load_noted_into
from lightning_parallel.pipeline.parameters.initial_values import drawing, drawn_values
from lightning_parallel.pipeline.parameters.table import ParameterTable, prefixes
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from lightning_parallel.pipeline.stage.random_streams import mix


@contextmanager
def without_memory() -> Iterator[None]:
    """Parameters registered inside get no memory (they land on the meta device); buffers stay real.

    After `seed_everything` they will have the initial values that one process draws (see ``initial_values.py``).
    """
    register = nn.Module.register_parameter
    with drawing("PL_GLOBAL_SEED" in os.environ) as drawn:

        def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if drawn is not None and parameter is not None:
                drawn.know(parameter)
            if parameter is not None and parameter.device.type != "meta":
                real = parameter.detach()
                on_meta = nn.Parameter(real.to("meta"), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, on_meta)
                if drawn is not None:
                    drawn.take(parameter, real)
            register(module, name, parameter)

        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


Made: TypeAlias = Callable[[str, nn.Parameter], None]


def make_in_parts(
    table: ParameterTable,
    device: torch.device,
    seed: int,
    divide: Callable[[Sequence[nn.Parameter]], None],
    made: Made,
    part: Part,
) -> set[nn.Parameter]:
    """Make blocks that have no memory yet, load their weights if that was asked for, and divide each before the next is
    made: what was divided.

    What lies outside of blocks is made first: its modules may initialise what is inside of them, which is then still to
    come.
    """
    divided: set[nn.Parameter] = set()
    blocks = parts(table)
    if blocks:
        materialize(table, device, seed, lambda name: not within(name, blocks), made)
    for block in blocks:
        materialize(table, device, seed, partial(within, modules=[block]), made)
        parameters = [p for p in table.model.get_submodule(block).parameters() if not p.is_meta]
        load_noted_into(table.model, set(parameters), part)
        divide(parameters)
        divided.update(parameters)
    return divided


def parts(table: ParameterTable) -> list[str]:
    """The names of the blocks in which all of a rank's parameters without memory lie that can be made block by
    block, in the order in which a backward is done with them; none where that cannot be.

    It cannot where some parameters have memory already, or a block shares some with what lies outside.
    """
    own, blocks = list(table.own()), table.blocks()
    units = [unit for unit in table.layout.units if unit.block is not None and table.holds_stage(unit.stage)]
    shared = [name for entry, _ in own if entry.name not in blocks for name in entry.names]
    shares = any(f"{name}.".startswith(f"{unit.name}.") for unit in units for name in shared)
    if shares or not all(parameter.is_meta for _, parameter in own):
        return []
    return [unit.name for unit in sorted(units, key=lambda unit: -(unit.block or 0))]


def materialize(
    table: ParameterTable,
    device: torch.device,
    seed: int,
    wanted: Callable[[str], bool] = lambda module: True,
    made: Made = lambda name, parameter: None,
) -> None:
    """Give a rank's meta parameters memory and initial values, module by module, whatever the layout.

    Args:
        table: of the model; parameters of other ranks are stand-ins.
        device: where.
        seed: of the initial values.
        wanted: asked with a module's name.
        made: told of a parameter that has its initial values, before the next module's get memory; not of those that
            several modules have.

    Raises:
        ValueError: a module holds meta parameters and nothing says how to initialise them.
    """
    memo: dict[int, Tensor] = {}
    for index, (name, module) in enumerate(table.model.named_modules()):
        own = [
            leaf
            for leaf, p in module._parameters.items()
            if p is not None and p.is_meta and not isinstance(p, ForeignParameter)
        ]
        if not own or not wanted(name):
            continue
        values = {leaf: drawn_values(cast(nn.Parameter, module._parameters[leaf])) for leaf in own}
        for leaf in own:
            parameter = module._parameters[leaf]
            assert parameter is not None
            if id(parameter) not in memo:
                drawn = values[leaf]
                held = torch.empty_like(parameter, device=device) if drawn is None else drawn.to(device).contiguous()
                memo[id(parameter)] = nn.Parameter(held, parameter.requires_grad)
            module._parameters[leaf] = memo[id(parameter)]
        is_drawn = all(value is not None for value in values.values())
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(mix(seed, index))
            if not is_drawn:
                _initializer(table.model, name, module)()
        for full in (f"{name}.{leaf}" if name else leaf for leaf in own):
            if len(table.by_name[full].names) == 1:
                made(full, table.model.get_parameter(full))


def _initializer(model: nn.Module, name: str, module: nn.Module) -> Callable[[], object]:
    if callable(getattr(module, "reset_parameters", None)):
        return module.reset_parameters  # type: ignore[return-value]
    for prefix in prefixes(name):
        owner = model.get_submodule(prefix)
        if callable(getattr(owner, "_init_weights", None)):
            return lambda: owner._init_weights(module)  # type: ignore[operator]
    raise ValueError(
        f"Module `{name}` ({type(module).__name__}) was built without memory in configure_model() and has no"
        " reset_parameters() to give its own parameters their initial values. Define it, or build the module in"
        " __init__."
    )


def within(name: str, modules: Sequence[str]) -> bool:
    """Whether a name is that of one of these modules or of something in one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)
