"""Which rank owns which parameter, and what the copies of shared ones do together.

The one idea: a parameter belongs to the stages whose units hold it. One whose stages lie on several ranks (tied
weights, a bare parameter of a container) is kept on each of them; its gradients are summed over them, so that equal
copies stay equal, and it counts once in norms. All others are replaced on this rank by `ForeignParameter`s: names,
shapes and groups, no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.partition.layout import StageLayout
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from lightning_parallel.pipeline.phantoms.phantom import Phantom


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter of the model.

    Attributes:
        name, names: its first name, and all its names.
        stages: the stages that use it.
        rows: the rows of the schedule whose ranks hold it, in the order of stages.
        bare: whether no unit holds it.
    """

    name: str
    names: tuple[str, ...]
    stages: tuple[int, ...]
    rows: tuple[int, ...]
    bare: bool = False

    def is_counted_on(self, row: int) -> bool:
        """Whether this row's copy is the one that counts in norms and checkpoints."""
        return row == self.rows[0]


class ParameterTable:
    """All parameters of a model in the order of `model.parameters()`, seen from one row of the schedule.

    Args:
        model: the model before anything was taken away, real or on the meta device.
        layout: what belongs where.
        holders: for each stage the rows that hold it.
        row: the row of this rank.
    """

    def __init__(self, model: nn.Module, layout: StageLayout, holders: Sequence[Sequence[int]], row: int) -> None:
        self.model, self.layout, self.holders, self.row = model, layout, holders, row
        stage_of_unit = {unit.name: unit.stage for unit in layout.units}
        every = tuple(range(layout.num_stages))
        names: dict[int, list[str]] = {}
        stages: dict[int, set[int]] = {}
        bare: set[int] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            unit = next((u for u in prefixes(name) if u in stage_of_unit), None)
            names.setdefault(id(parameter), []).append(name)
            bare |= {id(parameter)} if unit is None else set()
            stages.setdefault(id(parameter), set()).update(every if unit is None else (stage_of_unit[unit],))
        self.entries = tuple(
            ParameterEntry(found[0], tuple(found), tuple(sorted(stages[key])), self._rows_of(stages[key]), key in bare)
            for key, found in names.items()
        )
        self.by_name = {name: entry for entry in self.entries for name in entry.names}

    def _rows_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row for stage in sorted(stages) for row in self.holders[stage]))

    def rows_of_module(self, name: str) -> tuple[int, ...]:
        """The rows that hold a module of some unit, by its name.

        Raises:
            ValueError: it belongs to no unit.
        """
        unit = next((unit for unit in self.layout.units if f"{name}.".startswith(f"{unit.name}.")), None)
        if unit is None:
            raise ValueError(
                f"Module `{name}` lies outside the blocks and has no parameters, so that no stage holds it: schedules"
                " of two directions cannot add up its statistics. Give it parameters (affine=True), or use a schedule"
                " of one direction."
            )
        return self._rows_of([unit.stage])

    def holds_stage(self, stage: int) -> bool:
        """Whether this rank runs that stage."""
        return self.row in self.holders[stage]

    def owns(self, name: str) -> bool:
        return self.row in self.by_name[name].rows

    def own(self) -> Iterator[tuple[ParameterEntry, nn.Parameter]]:
        """This rank's parameters, in the order of the whole model."""
        for entry in self.entries:
            if self.row in entry.rows:
                yield entry, self.model.get_parameter(entry.name)

    def blocks(self) -> dict[str, int]:
        """The number of the block in which all of a parameter's names lie, by its first name; others are left out."""
        of_unit = {unit.name: unit.block for unit in self.layout.units}
        found: dict[str, int] = {}
        for entry in self.entries:
            units = {next((u for u in prefixes(name) if u in of_unit), "") for name in entry.names}
            block = of_unit.get(units.pop()) if len(units) == 1 else None
            if block is not None:
                found[entry.name] = block
        return found

    def shared(self) -> list[ParameterEntry]:
        """Parameters that several ranks hold."""
        return [entry for entry in self.entries if len(entry.rows) > 1]

    def drop_foreign(self, device: torch.device, model: nn.Module | None = None) -> None:
        """Replace every parameter and buffer of other stages' units by a stand-in without memory.

        Args:
            device: where the stand-ins claim to be.
            model: a copy of the model; default the model itself.
        """
        model = self.model if model is None else model
        for entry in self.entries:
            if self.row in entry.rows:
                continue
            like = model.get_parameter(entry.name)
            foreign = isinstance(like, ForeignParameter)
            stand_in: Any = like if foreign else ForeignParameter(like, device, entry.name, entry.stages)
            for name in entry.names:
                module, leaf = _parent(model, name)
                _replace_in_lists(module, module._parameters[leaf], stand_in)
                module._parameters[leaf] = stand_in
        self._drop_foreign_buffers(device, model)

    def _drop_foreign_buffers(self, device: torch.device, model: nn.Module) -> None:
        """Buffers of modules that only other stages' units hold."""
        mine = {
            id(m) for u in self.layout.units if self.holds_stage(u.stage) for m in model.get_submodule(u.name).modules()
        }
        for unit in self.layout.units:
            for name, module in model.get_submodule(unit.name).named_modules(prefix=unit.name):
                for leaf, buffer in module._buffers.items():
                    if id(module) not in mine and buffer is not None and not isinstance(buffer, Phantom):
                        origin = f"buffer `{name}.{leaf}` of stage {unit.stage}"
                        module._buffers[leaf] = Phantom(buffer.to("meta"), device, origin)


def sum_shared_gradients(
    table: ParameterTable,
    used: Sequence[ParameterEntry],
    gradients: dict[str, Tensor | None],
    all_reduce: Callable[[Tensor, Sequence[int]], None],
) -> None:
    """Sum the gradients of parameters that several ranks hold, so that every copy takes the same step.

    Args:
        table: the parameters.
        used: the shared ones that some rank made a gradient for; the same on all ranks.
        gradients: this rank's gradients by first name; entries are replaced by the sums.
        all_reduce: sums a tensor in place over the ranks of the given rows.
    """
    for entry in used:
        if table.row not in entry.rows:
            continue
        parameter = table.model.get_parameter(entry.name)
        if not parameter.requires_grad:
            continue
        gradient = gradients.get(entry.name)
        total = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
        all_reduce(total, entry.rows)
        gradients[entry.name] = total.detach()


def total_norm(
    gradients: Iterable[Tensor], device: torch.device, all_reduce: Callable[[Tensor], None], norm_type: float = 2.0
) -> Tensor:
    """Norm of the gradients of the whole model; `gradients` are those that this rank counts.

    Args:
        gradients: tensors of this rank, each counted on exactly one rank.
        device: where the norm is returned, float32 scalar.
        all_reduce: sums a tensor in place over all ranks of the copy.
        norm_type: p of the p-norm, finite.
    """
    norms = torch._foreach_norm(gradients, norm_type) if (gradients := list(gradients)) else []
    local = torch.zeros((), device=device)
    if norms:
        local = torch.stack([n.to(device, torch.float32) for n in norms]).pow(norm_type).sum()
    all_reduce(local)
    return local.pow(1.0 / norm_type)


def prefixes(name: str) -> Iterator[str]:
    """`a.b.c` -> `a.b.c`, `a.b`, `a`, longest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _replace_in_lists(module: nn.Module, old: Any, new: Any) -> None:
    """Where a module lists its own parameters in an attribute, as `nn.LSTM` does."""
    for value in vars(module).values():
        if type(value) is list:
            value[:] = [new if entry is old else entry for entry in value]


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
