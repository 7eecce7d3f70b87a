"""Parameters that several ranks of a model's copy hold: the groups of these ranks, and one value and gradient for all.

The one idea: who holds what follows from the placement of stages and from what each of them uses; all ranks of all
copies open the groups that follow from that in one order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.pipeline.gradients.data_axis import DataAxis
from lightning_parallel.pipeline.gradients.gradient_sums import GradientSums, equalize_gradients, refuse_sparse
from lightning_parallel.pipeline.parameters.replica_check import equalize_buffers
from lightning_parallel.pipeline.parameters.table import ParameterEntry, ParameterTable, sum_shared_gradients
from lightning_parallel.pipeline.transport.model_replica import ModelReplica


class SharedParameters(ModelReplica):
    """A copy of a model whose ranks share parameters.

    Attributes:
        table: which rank holds which parameter.
        own: the parameters of this rank.
        data: the ranks of this row in all copies.
        sums: what sums gradients while backwards run, over replicas or copies, where there are several.
    """

    table: ParameterTable
    own: list[tuple[ParameterEntry, nn.Parameter]]
    data: DataAxis
    sums: GradientSums | None
    _groups: dict[tuple[int, ...], Any]

    def all_reduce_over(self, tensor: Tensor, rows: Sequence[int]) -> None:
        """Sum over the ranks that share a parameter, in place."""
        with self.waiting("the stages that share a parameter"):
            dist.all_reduce(tensor, group=self._groups[tuple(sorted(rows))])

    def add_up_over_holders(self, values: Mapping[str, Tensor]) -> None:
        """Sum what every rank that holds a module has for it, in place, by the module's name.

        Raises:
            ValueError: a module lies outside the units of the cut.
        """
        by_rows: dict[tuple[int, ...], list[Tensor]] = {}
        for name, value in values.items():
            by_rows.setdefault(tuple(sorted(self.table.rows_of_module(name))), []).append(value)
        for rows, tensors in by_rows.items():
            if len(rows) > 1:
                flat = torch.cat(tensors)
                self.all_reduce_over(flat, rows)
                for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                    tensor.copy_(total)

    def take_means(self, fresh: Mapping[nn.Parameter, Tensor | None]) -> bool:
        """Put the means over all copies into `grad`, where their sums are on their way.

        Args:
            fresh: what the step made, which has not been added to `grad` yet.

        Returns:
            False where there are none, or some rank's were stale: gradients are still to be added up.
        """
        if self.sums is None or not self.sums.over_copies:
            return False
        trained = [(entry, parameter) for entry, parameter in self.own if parameter.requires_grad]
        made = {entry.name for entry, p in trained if fresh.get(p) is not None or p.grad is not None}
        used, stale = self._agree_on_shared(made, self.sums.is_stale(fresh))
        made |= {entry.name for entry in used}
        with self.waiting("the other copies of the model, to average gradients"):
            somewhere, stale = self.data.agree_on_gradients([entry.name in made for entry, _ in trained], stale)
            totals = self.sums.take(stale)
        for (_, parameter), count in zip(trained, somewhere, strict=True):
            if count and not stale:
                into = fresh.get(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = torch.div(totals[parameter], self.data.size, out=into)
        return not stale

    def sum_shared(self, gradients: dict[str, Tensor | None]) -> None:
        """Sum the gradients of parameters that several ranks hold; None stays None where no rank made one.

        Args:
            gradients: this rank's by first name; entries are replaced by the sums.
        """
        if not self.table.shared():
            return
        for entry in self.table.shared():
            refuse_sparse(entry, gradients.get(entry.name))
        made = {name for name, gradient in gradients.items() if gradient is not None}
        fresh = {parameter: gradients.get(entry.name) for entry, parameter in self.own}
        used, stale = self._agree_on_shared(made, self.sums is not None and self.sums.is_stale(fresh))
        with self.waiting("the ranks that hold the same parameters, to add up gradients"):
            sums = {} if self.sums is None else self.sums.take(stale)
        totals = {entry.name: sums[parameter] for entry, parameter in self.own if parameter in sums}
        gradients.update({entry.name: totals[entry.name] for entry in used if entry.name in totals})
        left = [entry for entry in used if entry.name not in totals]
        sum_shared_gradients(self.table, left, gradients, self.all_reduce_over)

    def _agree_on_shared(self, made: Collection[str], stale: bool) -> tuple[list[ParameterEntry], bool]:
        """Which parameters that several ranks hold have a gradient on some, and whether what some rank sent is stale.

        Who made one is agreed on the host, and only where there are bare parameters (a unit uses its own) or the device
        is the host anyway: it makes the stages' hosts wait for each other.
        """
        shared = self.table.shared()
        asks = self.device.type == "cpu" or any(entry.bare for entry in shared)
        said = torch.tensor([float(stale), *(float(entry.name in made) for entry in shared if asks)])
        if shared and (asks or self.sums is not None):
            self.all_reduce(said)
        is_stale, *counts = said.tolist()
        return [
            entry for entry, count in zip(shared, counts or [1.0] * len(shared), strict=True) if count
        ], is_stale > 0

    def equalize_shared_gradients(self) -> None:
        """Give all ranks that share a parameter the first one's gradient."""
        with self.waiting("the stages that share a parameter, to have one gradient"):
            equalize_gradients(self.table, self.ranks, self._groups)

    def _holders(self) -> list[list[int]]:
        """For each stage the rows that hold it, replica by replica."""
        places = sorted(self.placement.items())
        return [[row for (_, held), row in places if held == stage] for stage in range(self.num_stages)]

    def _open_groups(self) -> dict[tuple[int, ...], Any]:
        """A group for each set of ranks that shares a parameter; all ranks open all copies' in one order."""
        groups = {}
        held = [entry.rows for entry in self.table.shared()] + [tuple(dict.fromkeys(rows)) for rows in self._holders()]
        for rows in sorted({tuple(sorted(rows)) for rows in held if len(rows) > 1}):
            opened = [dist.new_group([ranks[row] for row in rows]) for ranks in self.copies]
            groups[rows] = opened[self.copy]
        return groups

    def open_sum_group(self, backend: str | None = None) -> Any:
        """A group of the ranks of this row in all copies beside that of the data axis, over which users talk too."""
        return self._open_over_copies([(row,) for row in range(self.num_ranks)], backend)[self.row,]

    def open_sum_groups(self) -> dict[tuple[int, ...], Any]:
        """Such a group for each row, and one for each set of rows that shares a parameter."""
        shared = {tuple(sorted(entry.rows)) for entry in self.table.shared()}
        return self._open_over_copies([*((row,) for row in range(self.num_ranks)), *sorted(shared)])

    def _open_over_copies(
        self, sets: Sequence[tuple[int, ...]], backend: str | None = None
    ) -> dict[tuple[int, ...], Any]:
        """For each set of rows a group of their ranks in all copies; all ranks open all in one order."""
        groups = {}
        for place in range(self.tensor_size):
            for rows in sets:
                ranks = [ranks[row] for ranks in self.copies[place :: self.tensor_size] for row in rows]
                opened = dist.new_group(ranks, backend=backend)
                groups.update({rows: opened} if self.rank in ranks else {})
        return groups

    def _equalize_shared(self) -> None:
        """Copies of a shared parameter begin equal, even where processes were not seeded."""
        for entry, parameter in self.own:
            if len(entry.rows) > 1:
                dist.broadcast(parameter.data, self.ranks[entry.rows[0]], group=self._groups[tuple(sorted(entry.rows))])
        if self.num_replicas > 1:
            equalize_buffers(self.table, self.ranks, self._groups)
