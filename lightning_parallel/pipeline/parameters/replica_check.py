"""What replicas of a stage hold beside gradients: values that begin equal, and a check that they stay so.

The one idea: an all-reduce gives all ranks the same gradients, so replicas part only if something else changes one of
them. A fingerprint of every parameter and buffer that several ranks hold is compared now and then, which costs a sum
over their bits and a message of a few numbers. Buffers that forwards write to cannot be kept equal so, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.pipeline.parameters.table import ParameterTable
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.pipeline.transport.payload import to_bytes

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
