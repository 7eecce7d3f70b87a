"""What optimizers keep, from the pieces that ranks hold to one process's state dict, and back.

The one idea: a piece says which elements of which parameter it is, in the numbering of one process. So it fits any
number of ranks, and what one process saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.native.partition import Partition, ShardedOptimizer, is_by_element

Gather = Callable[[Any], Sequence[Any] | None]
Deal = Callable[[Any, int], Sequence[Any] | None]


@dataclass(frozen=True)
class Piece:
    """Some elements of a tensor that has an entry for each element of a parameter.

    Args:
        begin: the first of them, in the flattened parameter.
        values: the elements [k], on the host.
        shape: of the whole.
    """

    begin: int
    values: Tensor
    shape: torch.Size


def full_optimizer_state(optimizer: ShardedOptimizer, gather: Gather) -> dict[str, Any]:
    """The state dict that the optimizer would have in one process; empty off the gathering rank. All ranks call it.

    Args:
        optimizer: whose state.
        gather: gathers an object of every rank on one of them.
    """
    parts = gather(own_pieces(optimizer))
    if parts is None:
        return {}
    return {"state": join_pieces(parts), "param_groups": numbered_groups(optimizer.optimizer)}


def numbered_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups with parameters by number, as its state dict has them."""
    groups, count = [], 0
    for group in optimizer.param_groups:
        size = len(group["params"])
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": list(range(count, count + size))})
        count += size
    return groups


def own_pieces(optimizer: ShardedOptimizer) -> dict[int, dict[str, Any]]:
    """This rank's part of the optimizer's state: by number of the parameter, by field."""
    partition, found = optimizer.partition, {}
    if partition.ranks.replica:  # another rank owns, and tells, the same
        return {}
    for number, parameter in enumerate(optimizer.parameters):
        segment, state = partition.segment(parameter), optimizer.state_of(parameter)
        if segment is not None and state:
            fields = state.items()
            found[number] = {name: _piece(name, value, segment, parameter, partition) for name, value in fields}
    return found


def join_pieces(parts: Sequence[Mapping[Any, Mapping[str, Any]]]) -> dict[Any, dict[str, Any]]:
    """Whole tensors of the pieces of several ranks; what is not a piece is the same on all."""
    keys = sorted({key for part in parts for key in part})
    joined: dict[Any, dict[str, Any]] = {}
    for key in keys:
        of_ranks = [part[key] for part in parts if key in part]
        joined[key] = {name: _join([of[name] for of in of_ranks]) for name in of_ranks[0]}
    return joined


def whole_on_owners(pieces: Mapping[Any, Mapping[str, Any]], keys: Sequence[Any], deal: Deal) -> dict[Any, Any]:
    """Whole tensors of pieces, each on one rank, dealt in turn; one of them is on its way at a time. Collective.

    Args:
        pieces: this rank's.
        keys: of all ranks' pieces, in the same order on every rank.
        deal: gathers an object of every rank on the rank whose turn it is, None elsewhere.

    Returns:
        What this rank is to save.
    """
    found: dict[Any, Any] = {}
    for turn, key in enumerate(keys):
        parts = deal(pieces.get(key), turn)
        if parts is not None and (there := [part for part in parts if part]):
            found |= join_pieces([{key: part} for part in there])
    return found


def load_optimizer_state(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """Take this rank's part of a one-process state dict.

    Raises:
        ValueError: its groups have other sizes than this optimizer's.
    """
    refuse_groups(optimizer.optimizer, state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    pairs = zip(numbers, optimizer.parameters, strict=True)
    cuts = {p: optimizer.partition.cut(p, state["state"][number]) for number, p in pairs if number in state["state"]}
    groups: list[dict[str, Any]] = []
    local: dict[int, Any] = {}
    count = 0
    for saved, group in zip(state["param_groups"], optimizer.optimizer.param_groups, strict=True):
        held = [p for p in group["params"] if optimizer.partition.segment(p) is not None]
        local |= {count + i: cuts[p] for i, p in enumerate(held) if p in cuts}
        groups.append({**saved, "params": list(range(count, count + len(held)))})
        count += len(held)
    with optimizer.segments():
        optimizer.optimizer.load_state_dict({"state": local, "param_groups": groups})


def refuse_groups(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise for a state dict of an optimizer with other groups.

    Raises:
        ValueError: its groups have other sizes than this optimizer's.
    """
    sizes = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise ValueError(
            f"The checkpoint's {type(optimizer).__name__} has parameter groups of sizes {sizes}, this run's has {own}."
            " Resume with the optimizer that saved it."
        )


def own_masters(partition: Partition) -> dict[str, dict[str, Any]]:
    """This rank's part of the 32-bit copies of parameters, by the parameters' names."""
    found: dict[str, dict[str, Any]] = {}
    for parameter, name in partition.names.items() if not partition.ranks.replica else ():
        segment = partition.segment(parameter) if partition.holds(parameter) else None
        if segment is not None and segment.dtype != parameter.dtype:
            found[name] = {"master": _piece("master", segment.detach(), segment, parameter, partition)}
    return found


def load_masters(partition: Partition, masters: Mapping[str, Tensor]) -> None:
    """Take this rank's part of the 32-bit copies; parameters that have none keep what was made of their values."""
    for parameter, name in partition.names.items():
        segment = partition.segment(parameter) if partition.holds(parameter) else None
        if name in masters and segment is not None and segment.dtype != parameter.dtype:
            begin, end = partition.piece(parameter)
            segment.data.copy_(masters[name].flatten()[begin:end].view(segment.shape))


def host_copy(value: Any) -> Any:
    """A tensor's copy on the host, which nobody else writes to; another value as it is."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _piece(field: str, value: Any, segment: nn.Parameter, parameter: nn.Parameter, partition: Partition) -> Any:
    if is_by_element(field, value, segment.shape):
        return Piece(partition.piece(parameter)[0], value.detach().cpu().clone().flatten(), partition.shapes[parameter])
    return host_copy(value)


def _join(values: Sequence[Any]) -> Any:
    if not isinstance(values[0], Piece):
        return values[0]
    pieces = sorted(values, key=lambda piece: piece.begin)
    return torch.cat([piece.values for piece in pieces]).view(pieces[0].shape)
