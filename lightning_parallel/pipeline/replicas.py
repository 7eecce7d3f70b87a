"""What ranks that hold the same stage do together, in schedules that run several replicas of a pipeline at once.

The one idea: two replicas of a stage are parameters that several ranks hold. Every rank has the gradients of its own
micro-batches; their sums begin as soon as the rank's last backward of a stage is done, while other stages still work,
and are taken when the optimizer wants them. An all-reduce gives all ranks the same bits, so replicas that begin equal
stay equal; `compare` asks, now and then, whether they did. Source: Li and Hoefler, Chimera, arXiv 2107.06925,
section 3.2 (gradient synchronization as soon as the local gradients are there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.pipeline.buckets import buckets, views
from lightning_parallel.pipeline.channel import Waiting, nobody_waits, to_bytes
from lightning_parallel.pipeline.parameters import Entry, ParameterTable
from lightning_parallel.pipeline.phantom import Phantom
from lightning_parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Share:
    """Parameters that the same ranks hold for the same stages: their gradients are ready at one moment."""

    stages: tuple[int, ...]
    rows: tuple[int, ...]
    entries: tuple[Entry, ...]


@dataclass
class _Sum:
    """A sum under way: the parameters, what of their gradients went into it, and the all-reduces that run."""

    share: Share
    given: list[tuple[Entry, Tensor | None, int]]  # and the version of the gradient
    sent: list[tuple[list[Tensor], Tensor, Any]] = field(default_factory=list)
    counts: Tensor | None = None


class GradientSums:
    """The sums of gradients over the ranks that hold a parameter.

    Args:
        table: the parameters.
        groups: a process group for each set of rows that shares one, by sorted rows.
        device: where this rank computes.
        waiting: a context entered while this process is blocked.
    """

    def __init__(
        self,
        table: ParameterTable,
        groups: Mapping[tuple[int, ...], Any],
        device: torch.device,
        waiting: Waiting = nobody_waits,
    ) -> None:
        self._table, self._groups, self._device, self._waiting = table, groups, device, waiting
        self._shares = shares_of(table)
        self._plans: dict[Schedule, list[tuple[int, Share]]] = {}
        self._under_way: list[_Sum] = []

    def begin(self, schedule: Schedule) -> Callable[[int], None]:
        """A step begins; what it returns is called after each of this rank's actions, by number, and with -1 first."""
        self._under_way.clear()
        if schedule not in self._plans:
            self._plans[schedule] = plan(schedule, self._shares, self._table.row)
        coming = iter(self._plans[schedule])
        waiting = next(coming, None)

        def after(action: int) -> None:
            nonlocal waiting
            while waiting is not None and waiting[0] <= action:
                self._start(waiting[1])
                waiting = next(coming, None)

        return after

    def _start(self, share: Share) -> None:
        parameters = [(entry, self._table.model.get_parameter(entry.name)) for entry in share.entries]
        parameters = [(entry, parameter) for entry, parameter in parameters if parameter.requires_grad]
        if not parameters:
            return
        given = [(entry, p.grad, -1 if p.grad is None else p.grad._version) for entry, p in parameters]
        for entry, gradient, _ in given:
            if gradient is not None and gradient.is_sparse:
                raise ValueError(
                    f"The gradient of `{entry.name}` is sparse, which replicas of a stage do not add up. Use"
                    " sparse=False, or a schedule of one direction."
                )
        here = [torch.zeros_like(p) if g is None else g for (_, p), (_, g, _) in zip(parameters, given, strict=True)]
        group, under_way = self._groups[tuple(sorted(share.rows))], _Sum(share, given)
        for bucket in buckets([gradient.detach() for gradient in here]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            under_way.sent.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
        if self._device.type == "cpu" or any(entry.bare for entry in share.entries):
            made = torch.tensor([float(gradient is not None) for _, gradient, _ in given], device=self._device)
            under_way.sent.append(([], made, dist.all_reduce(made, group=group, async_op=True)))
            under_way.counts = made
        self._under_way.append(under_way)

    def collect(self, gradients: dict[str, Tensor | None]) -> None:
        """Put the sums in the place of this rank's own gradients, by first name; None stays where no rank made one.

        On a CUDA device a unit's parameters count as used, since to ask would make hosts wait for devices.

        Raises:
            ValueError: a gradient grew after its sum had begun.
        """
        for under_way in self._under_way:
            self._refuse_late(under_way, gradients)
            totals: list[Tensor] = []
            with self._waiting("the ranks that hold the same stage, to add up gradients"):
                for bucket, flat, work in under_way.sent:
                    work.wait()
                    totals += views(flat, bucket) if bucket else []
            counts = [1.0] * len(totals) if under_way.counts is None else under_way.counts.tolist()
            for (entry, _, _), total, count in zip(under_way.given, totals, counts, strict=True):
                gradients[entry.name] = total if count else None
        self._under_way.clear()

    def _refuse_late(self, under_way: _Sum, gradients: Mapping[str, Tensor | None]) -> None:
        for entry, before, version in under_way.given:
            now = gradients.get(entry.name)
            if now is not before or (now is not None and now._version != version):
                raise ValueError(
                    f"Parameter `{entry.name}` of stage {entry.stages[0]} got a gradient from another stage's backward:"
                    " the step uses it outside its module. Compute such a term from a module's own forward, or use the"
                    " optimizer's weight_decay, or a schedule of one direction."
                )


def shares_of(table: ParameterTable) -> list[Share]:
    """The parameters that several ranks hold, in the order of the model, gathered by stages and rows."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Entry]] = {}
    for entry in table.shared():
        found.setdefault((entry.stages, entry.rows), []).append(entry)
    return [Share(stages, rows, tuple(entries)) for (stages, rows), entries in found.items()]


def plan(schedule: Schedule, shares: Sequence[Share], row: int) -> list[tuple[int, Share]]:
    """The shares of a row in the order in which all rows begin their sums, each with the action it waits for.

    Rows that share several things begin their sums in one order, or they would wait for each other: that in which the
    last of all rows' backwards come in an order that serves every dependency.

    Returns:
        (number of the action in the row, -1 for none; share), in order.
    """
    numbers = {step.action.key: number for number, step in enumerate(schedule.order)}

    def last(share: Share, of: int) -> tuple[int, int]:
        """When a row's last backward of a share is: in the order of all actions, and in the row."""
        ends = [
            (numbers[action.key], at)
            for at, action in enumerate(schedule.actions[of])
            if action.stage in share.stages and action.kind in "BIW"
        ]
        return max(ends, default=(-1, -1))

    held = sorted(
        (max(last(share, of) for of in share.rows)[0], number, share)
        for number, share in enumerate(shares)
    )  # fmt: skip
    return [(last(share, row)[1], share) for _, _, share in held if row in share.rows]


def equalize_buffers(table: ParameterTable, ranks: Sequence[int], groups: Mapping[tuple[int, ...], Any]) -> None:
    """Give every replica of a stage the first one's buffers, in place.

    Args:
        table: what this rank holds.
        ranks: the global rank of each row.
        groups: see `GradientSums`.
    """
    for _, _, rows, buffer in shared_buffers(table, all_of_them=True):
        payload = to_bytes(buffer).clone()
        dist.broadcast(payload, ranks[rows[0]], group=groups[tuple(sorted(rows))])
        if not torch.equal(payload, to_bytes(buffer)):
            buffer.copy_(payload.view(buffer.dtype).view(buffer.shape))


# -- are they still equal? ---------------------------------------------------------------------------------------------


Held = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]  # name, stages, rows


def shared_parameters(table: ParameterTable) -> Iterator[Held]:
    """This rank's parameters that other rows hold too."""
    for entry, parameter in table.own():
        if len(entry.rows) > 1:
            yield f"Parameter `{entry.name}`", entry.stages, entry.rows, parameter


def shared_buffers(table: ParameterTable, all_of_them: bool = False) -> Iterator[Held]:
    """This rank's buffers that other rows hold too; those that are not persistent only if asked for."""
    for unit in table.layout.units:
        rows = table.rows_of_module(unit.name)
        if table.row in rows and len(rows) > 1:
            for name, buffer in real_buffers(table.model.get_submodule(unit.name), unit.name, all_of_them):
                yield f"Buffer `{name}`", (unit.stage,), rows, buffer


def real_buffers(module: nn.Module, prefix: str = "", all_of_them: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Buffers without stand-ins; those that are not persistent only if asked for."""
    for path, part in module.named_modules(prefix=prefix):
        for leaf, buffer in part._buffers.items():
            left_out = leaf in part._non_persistent_buffers_set and not all_of_them
            if buffer is not None and not left_out and not isinstance(buffer, Phantom) and not buffer.is_meta:
                yield f"{path}.{leaf}" if path else leaf, buffer


def compare(
    table: ParameterTable, ranks: Sequence[int], all_gather: Callable[[Any], list[Any]], when: str
) -> None:  # fmt: skip
    """Are the copies of what several ranks hold the same bits? Collective; `all_gather` in the order of global ranks.

    Args:
        table: the parameters.
        ranks: the global rank of each row.
        all_gather: gives every rank's object.
        when: for the message, as in "before training batch 4".

    Raises:
        ValueError: they are not, naming what, its stage and the ranks.
    """
    everything = [*shared_parameters(table), *shared_buffers(table)]
    held = [(name, stages, rows, fingerprint(tensor)) for name, stages, rows, tensor in everything]
    prints = torch.stack([entry[3] for entry in held]).tolist() if held else []
    mine = {name: (value, stages, rows) for (name, stages, rows, _), value in zip(held, prints, strict=True)}
    by_rank = dict(zip(sorted(ranks), all_gather(mine), strict=True))
    for name, (_, stages, rows) in mine.items():
        first, *others = [ranks[row] for row in rows]
        apart = [rank for rank in others if by_rank[rank][name][0] != by_rank[first][name][0]]
        if apart:
            raise ValueError(
                f"{name} of stage {stages[0]} is no longer the same on all ranks that hold a replica of it: rank"
                f" {', '.join(map(str, apart))} unlike rank {first}, found {when}. Something changed it on one rank"
                " only. Change weights in hooks and callbacks alike on every rank (with random numbers from a generator"
                " that is seeded alike), or use a schedule of one direction."
            )


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that changes with the bits of a tensor, int64 on its device: rows weighed by their odd place, added up.

    Example:
        >>> a = torch.tensor([[1.0], [2.0]])
        >>> fingerprint(a) == fingerprint(a.clone()), fingerprint(a) == fingerprint(a.flip(0))
        (tensor(True), tensor(False))
    """
    flat = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)
    if not flat.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).flatten(1)
    bits = flat.contiguous().view(_INTEGER[flat.element_size()]).sum(1, dtype=torch.int64)
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()


_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def buffers_unchanged(module: nn.Module) -> Iterator[None]:
    """Around the micro-batches of a step: nothing may be written into a persistent buffer.

    What a forward writes there one replica's micro-batches would write, and another replica would not see.

    Raises:
        ValueError: something was, naming the buffer.
    """
    before = [(name, fingerprint(buffer)) for name, buffer in real_buffers(module)]
    yield
    after = {name: fingerprint(buffer) for name, buffer in real_buffers(module)}
    for name, was in before:
        if name in after and not torch.equal(was, after[name]):
            raise ValueError(
                f"A step writes into buffer `{name}`, which each replica of a stage would do for its own micro-batches"
                " alone. Use a schedule of one direction, such as 1f1b or zb_v, or register the buffer with"
                " persistent=False if it is only a cache."
            )
