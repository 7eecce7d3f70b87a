"""A torch optimizer as an update of the server, and its state there and back.

The one idea: SGD, Adagrad, Adam and AdamW are recognised by class and by what their groups say; whatever would make the
server's arithmetic another is refused, in words. Learning rates are the optimizer's all the time, so that schedulers
work; they travel with pushes. Left out: optimizers that are not known here: workers run those themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.parameter_server.clock import VectorClock
from lightning_parallel.parameter_server.messages import Copy
from lightning_parallel.parameter_server.server.history import Range
from lightning_parallel.parameter_server.table import Grouped, Table
from lightning_parallel.parameter_server.updates import SGD, Adagrad, Adam, AdamW, Update

Groups = list[list[Tensor]]
_FIELDS: dict[type[Optimizer], tuple[type[Update], tuple[str, ...]]] = {
    torch.optim.SGD: (SGD, ("momentum", "dampening", "weight_decay", "nesterov")),
    torch.optim.Adagrad: (Adagrad, ("eps", "initial_accumulator_value")),
    torch.optim.Adam: (Adam, ("betas", "eps", "weight_decay")),
    torch.optim.AdamW: (AdamW, ("betas", "eps", "weight_decay")),
}
_OFF = ("maximize", "amsgrad", "lr_decay")  # what the server's updates do not have
_RELATIVE = 1e-6


def groups_of(optimizer: Optimizer) -> Groups:
    """The optimizer's parameters that train, by group."""
    return [[parameter for parameter in group["params"] if parameter.requires_grad] for group in optimizer.param_groups]


def update_of(optimizer: Optimizer, widths: Sequence[int]) -> Grouped:
    """The server's update that does what a torch optimizer does.

    Args:
        optimizer: SGD, Adagrad, Adam or AdamW of torch, with any groups.
        widths: of the table of its parameters.

    Raises:
        ValueError: the optimizer is of another class, or has an option that the server's updates do not have.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
        >>> update_of(optimizer, (2,)).parts
        (SGD(lr=0.1, momentum=0.9, dampening=0, weight_decay=0, nesterov=False),)
    """
    if type(optimizer) not in _FIELDS:
        known = ", ".join(kind.__name__ for kind in _FIELDS)
        raise ValueError(f"The servers know {known}, and this is {type(optimizer).__name__}.")
    kind, names = _FIELDS[type(optimizer)]
    for group in optimizer.param_groups:
        for name in _OFF:
            if group.get(name):
                raise ValueError(f"The servers' {kind.__name__} has no {name}, and a group has {name}={group[name]!r}.")
        if kind is Adagrad and group.get("weight_decay"):
            raise ValueError("The servers' Adagrad has no weight_decay.")
    parts = tuple(
        _kind(kind, group)(lr=_base(group), **{n: group[n] for n in names})  # type: ignore[call-arg]
        for group in optimizer.param_groups
    )
    rates = [part.lr for part in parts]  # type: ignore[attr-defined]
    return Grouped(parts, tuple(widths), rates.index(max(rates)))


def _kind(kind: type[Update], group: Mapping[str, Any]) -> type[Update]:
    """A group's update: since torch 2.7 Adam may decay weights as AdamW does."""
    return AdamW if kind is Adam and group.get("decoupled_weight_decay") else kind


def _base(group: Mapping[str, Any]) -> float:
    """The learning rate that a group's others are multiples of: where a scheduler began, or what it is now."""
    return float(group.get("initial_lr", group["lr"]))


@dataclass
class Rates:
    """Reads the learning rate of a push off an optimizer, and sees to it that nothing else has changed.

    Args:
        optimizer: whose groups schedulers write to.
        update: made of it; any other update has a rate of its own.
    """

    optimizer: Optimizer
    update: Update
    _known: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self._known = [self._others(group) for group in self.optimizer.param_groups]

    def read(self) -> float | None:
        """The leading group's learning rate; None where the update has its own.

        Raises:
            ValueError: groups' rates no longer keep their ratio, or another number has changed.
        """
        if not isinstance(self.update, Grouped):
            return None
        groups, lead = self.optimizer.param_groups, self.update.leader
        lr = float(groups[lead]["lr"])
        for index, (group, known) in enumerate(zip(groups, self._known, strict=True)):
            self._compare(index, group, known, lr, self.update.rate(index, lr) or 0.0)
        return lr

    def _compare(
        self, index: int, group: Mapping[str, Any], known: Mapping[str, Any], lr: float, wanted: float
    ) -> None:
        if abs(group["lr"] - wanted) > _RELATIVE * max(abs(wanted), abs(group["lr"])):
            raise ValueError(
                f"Group {index} has lr={group['lr']}, but with a push travels one rate ({lr}), to which it would be"
                f' {wanted}. Schedule all groups by one factor, or let workers run the optimizer (update="worker").'
            )
        if self._others(group) != known:
            raise ValueError(
                f"Group {index} of the optimizer has changed from {known} to {self._others(group)}, but the servers are"
                " told of learning rates alone. Schedule lr only (OneCycleLR(cycle_momentum=False)), or let workers run"
                ' the optimizer (update="worker").'
            )

    def _others(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = _FIELDS.get(type(self.optimizer), (Update, ()))[1]
        return {name: group[name] for name in names}


@dataclass
class ServedOptimizer:
    """Sees to it that an optimizer goes on to update what the servers hold, no more and no less.

    Args:
        optimizer: to be looked at.
        may_freeze: whether parameters that stop to train do no harm.
    """

    optimizer: Optimizer
    may_freeze: bool = False
    _known: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._known = self._trains()

    def check(self) -> None:
        """Look.

        Raises:
            ValueError: a parameter was added, frozen, or set free.
        """
        now = self._trains()
        freed = any(after and not before for before, after in zip(self._known, now, strict=False))
        if len(now) != len(self._known) or freed or (now != self._known and not self.may_freeze):
            raise ValueError(
                f"The optimizer has {sum(now)} parameters that train of {len(now)}, and at first had"
                f" {sum(self._known)} of {len(self._known)}; the servers' table is made once. Freeze and add parameters"
                " before fit."
            )

    def _trains(self) -> list[bool]:
        return [parameter.requires_grad for group in self.optimizer.param_groups for parameter in group["params"]]


def initial_ranges(table: Table, update: Update, weights: Tensor, optimizer: Optimizer | None = None) -> list[Range]:
    """Ranges that begin with weights, and with what an optimizer has in its state.

    Args:
        table: of the weights.
        update: what pushes do.
        weights: shape (size,), packed.
        optimizer: a torch optimizer of the table's parameters, fresh or from a checkpoint.
    """
    slots, steps = ({}, 0) if optimizer is None else _slots(table, optimizer)
    ranges = []
    for key, part in enumerate(table.layout.split(weights)):
        new = Range(key, table.layout.length(key), update)
        new.weights, new.seeded, new.steps = part.clone(), True, steps
        new.lsn, new.clocks = 1, VectorClock()
        for name, columns in slots.items():
            new.state[name] = columns[key].clone()
        ranges.append(new)
    return ranges


def _slots(table: Table, optimizer: Optimizer) -> tuple[dict[str, Tensor], int]:
    """The optimizer's state vectors, a row for each range, and how many steps it has made."""
    kind = _FIELDS[type(optimizer)][0]
    slots: dict[str, Tensor] = {}
    steps = [0]
    for index, group in enumerate(groups_of(optimizer)):
        states = [optimizer.state.get(parameter, {}) for parameter in group]
        steps += [int(state.get("step", 1)) for state in states if state]
        for slot in kind.slots:
            vectors = [state.get(slot) for state in states]
            if any(vector is not None for vector in vectors):
                slots[f"{index}.{slot}"] = table._column(vectors, index)
    return slots, max(steps) if slots else 0


def optimizer_state(table: Table, copies: Mapping[int, Copy], optimizer: Optimizer) -> dict[str, Any]:
    """What `optimizer.state_dict()` would be, had the optimizer made the servers' steps in this process.

    Args:
        table: of the optimizer's parameters.
        copies: all ranges, by key.
        optimizer: gives groups and numbering.
    """
    kind = _FIELDS[type(optimizer)][0]
    found = optimizer.state_dict()
    steps = max(copy.numbers["steps"] for copy in copies.values())
    names = [name for name in copies[0].tensors if name.startswith("state.")]
    if not steps or not names:
        return found
    state: dict[int, dict[str, Any]] = {}
    for index, packed in enumerate(found["param_groups"]):
        columns = {slot: f"state.{index}.{slot}" for slot in kind.slots if f"state.{index}.{slot}" in names}
        tensors = {
            slot: table._tensors(torch.cat([copies[key].tensors[name] for key in sorted(copies)]), table.shapes[index])
            for slot, name in columns.items()
        }
        own = optimizer.param_groups[index]["params"]
        trained = [n for n, parameter in zip(packed["params"], own, strict=True) if parameter.requires_grad]
        for place, number in enumerate(trained):
            one = {slot: vectors[place].clone() for slot, vectors in tensors.items()}
            if kind is Adagrad or any(vector.any() for vector in one.values()):  # others never had a gradient
                state[number] = ({} if kind is SGD else {"step": torch.tensor(float(steps))}) | one
    return found | {"state": state}
