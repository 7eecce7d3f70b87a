"""Parameters that several ranks of a model's copy hold: the groups of these ranks, and one value and gradient for all.

The one idea: who holds what follows from the placement of stages and from what each of them uses; all ranks of all
copies open the groups that follow from that in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.pipeline.copy_of_model import Copy
from lightning_parallel.pipeline.parameters import Entry, ParameterTable, sum_shared_gradients
from lightning_parallel.pipeline.replica_check import equalize_buffers
from lightning_parallel.pipeline.replicas import GradientSums, equalize_gradients


class SharedParameters(Copy):
    """A copy of a model whose ranks share parameters.

    Attributes:
        table: which rank holds which parameter.
        own: the parameters of this rank.
        sums: what sums gradients of replicas while backwards run, where there are several.
    """

    table: ParameterTable
    own: list[tuple[Entry, nn.Parameter]]
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

    def sum_shared(self, gradients: dict[str, Tensor | None]) -> None:
        """Sum the gradients of parameters that several stages hold; None stays None where no stage made one.

        Who made one is agreed on the host, and only where there are bare parameters (a unit uses its own) or the device
        is the host anyway: it makes the stages' hosts wait for each other.
        """
        if self.sums is not None:
            self.sums.collect(gradients)
            return
        shared = self.table.shared()
        if not shared:
            return
        made = torch.tensor([float(gradients.get(entry.name) is not None) for entry in shared])
        if self.device.type == "cpu" or any(entry.bare for entry in shared):
            self.all_reduce(made)
        else:
            made.fill_(1.0)
        used = [entry for entry, count in zip(shared, made.tolist(), strict=True) if count]
        sum_shared_gradients(self.table, used, gradients, self.all_reduce_over)

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

    def open_sum_group(self) -> Any:
        """A group of the ranks of this row in all copies beside that of the data axis, over which users talk too."""
        found = None
        for place in range(self.tensor_size):
            for row in range(self.num_ranks):
                ranks = [ranks[row] for ranks in self.copies[place :: self.tensor_size]]
                opened = dist.new_group(ranks)
                found = opened if self.rank in ranks else found
        return found

    def _equalize_shared(self) -> None:
        """Copies of a shared parameter begin equal, even where processes were not seeded."""
        for entry, parameter in self.own:
            if len(entry.rows) > 1:
                dist.broadcast(parameter.data, self.ranks[entry.rows[0]], group=self._groups[tuple(sorted(entry.rows))])
        if self.num_replicas > 1:
            equalize_buffers(self.table, self.ranks, self._groups)
