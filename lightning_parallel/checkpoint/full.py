"""One full checkpoint from the parts that ranks hold, in the keys and the numbering of one process, and back.

The one idea: every rank knows the names of all parameters and the groups the user's `configure_optimizers` made of
them. A rank's optimizer keeps only what the rank owns, also of groups that are added later; its state is told by name,
so that it fits any number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.parallel.uncut import Uncut
from lightning_parallel.pipeline.parameters.table import ParameterTable
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.zero.optimizer.guarded_state import GuardedOptimizer, exposed, give_back, held_state
from lightning_parallel.zero.optimizer.state import numbered_groups

Gather = Callable[[Any], Sequence[Any] | None]
_WORDS = (
    "The states of {name} are in several processes, each with those of its own stage, and this reads them on one. Call"
    " trainer.strategy.optimizer_state(optimizer) on all ranks: rank 0 gets the state dict that one process would have."
    " optimizer.state[p] may be read of a parameter that this rank holds."
)
States = Mapping[Any, Mapping[str, Any]]  # of an optimizer, by parameter


class PrunedOptimizer:
    """An optimizer whose groups were reduced to this rank's parameters, and the numbering they had before.

    Args:
        optimizer: with the groups that `configure_optimizers` made, stand-ins for other stages' parameters included.
        table: the parameters.
        agree: raises unless all ranks give it the same; called when a group is added.
        tensor: how parameters are cut over the tensor axis.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        table: ParameterTable,
        agree: Callable[[Mapping[str, Any]], None],
        tensor: Uncut | None = None,
    ) -> None:
        self.optimizer, self.table, self._agree = optimizer, table, agree
        self.tensor = tensor or Uncut()
        self.groups: list[list[str]] = []
        self.prune()
        self._add_group = optimizer.add_param_group
        self._before = {"add_param_group": vars(optimizer).get("add_param_group")}
        optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]
        self._guarded: GuardedOptimizer | None = None
        if self.tensor.shares or any(not table.owns(name) for name in self.table.by_name):
            self._guarded = GuardedOptimizer(optimizer, _WORDS.format(name=type(optimizer).__name__), self._is_whole)

    def _is_whole(self, parameter: Any) -> bool:
        """Whether this rank has all of a parameter's state, which hooks may read."""
        held = {id(p): entry.name for entry, p in self.table.own()}
        return id(parameter) in held and held[id(parameter)] not in self.tensor.shares

    def unguard(self) -> None:
        """Somebody else is about to guard the optimizer's state."""
        if self._guarded is not None:
            self._guarded.undo()
            self._guarded = None

    def release(self) -> None:
        """Give the optimizer its own methods back."""
        if self._guarded is not None:
            self._guarded.release()
        give_back(self.optimizer, self._before)

    def prune(self) -> None:
        """Leave each group this rank's parameters.

        Raises:
            ValueError: a group has parameters that the LightningModule does not register.
        """
        name_of = {id(self.table.model.get_parameter(entry.name)): entry.name for entry in self.table.entries}
        new = self.optimizer.param_groups[len(self.groups) :]
        unknown = [p for group in new for p in group["params"] if id(p) not in name_of]
        if unknown:
            raise ValueError(
                f"configure_optimizers gave {type(self.optimizer).__name__} {len(unknown)} parameters that the"
                " LightningModule does not register. Assign their module to an attribute of the LightningModule."
            )
        self.groups += [[name_of[id(p)] for p in group["params"]] for group in new]
        self.names = [name for group in self.groups for name in group]
        self.number = {name: i for i, name in enumerate(self.names)}
        for group in new:
            for parameter in group["params"]:
                if isinstance(parameter, ForeignParameter):
                    held_state(self.optimizer).pop(parameter, None)  # Adagrad makes its state at construction
            group["params"] = [p for p in group["params"] if not isinstance(p, ForeignParameter)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`optimizer.add_param_group`, for a callback that unfreezes layers as training goes.

        Raises:
            ValueError: the ranks added different parameters.
        """
        self._add_group(param_group)
        self.prune()
        self._agree({f"group {len(self.groups) - 1} of {type(self.optimizer).__name__}": self.groups[-1]})

    def take_over(self) -> None:
        """All groups were replaced by whole ones, as a callback does that resumes."""
        self.groups = []
        self.prune()

    def full_state(self, gather: Gather, states: States | None = None) -> dict[str, Any]:
        """The state dict that the optimizer would have in one process; empty off the gathering rank.

        Args:
            gather: gathers an object of every rank on one of them.
            states: of this rank's parameters, where they are not in the optimizer.
        """
        mine = self.own_state(states, self.tensor)
        parts = gather(mine["state"])
        if parts is None:
            return {}
        states = {i: state for part in parts for i, state in part.items()}
        return {**mine, "state": dict(sorted(states.items()))}

    def own_state(self, states: States | None = None, tensor: Uncut | None = None) -> dict[str, Any]:
        """This rank's part of that state dict, with the groups of the whole.

        Args:
            states: see `full_state`.
            tensor: makes whole what the tensor axis cut; None leaves this rank's part of it.
        """
        tensor = tensor or Uncut()
        states = held_state(self.optimizer) if states is None else states
        groups = numbered_groups(self.optimizer)
        for group, names in zip(groups, self.groups, strict=True):
            group["params"] = [self.number[name] for name in names]
        own = {
            self.number[entry.name]: _to_host(tensor.whole_state(entry.name, states[parameter]))
            for entry, parameter in self.table.own()
            if entry.is_counted_on(self.table.row) and entry.name in self.number and states.get(parameter)
        }
        return {"state": own, "param_groups": groups}

    def holds(self, number: int) -> bool:
        """Whether this rank holds the parameter of that number."""
        return self.table.owns(self.names[number])

    def load_full_state(self, state: Mapping[str, Any], load: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Take this rank's part of a one-process state dict.

        Args:
            state: of the whole optimizer.
            load: takes the part over, in the numbering of this rank's optimizer, whose state it finds as it is outside
                of methods; default the optimizer itself.

        Raises:
            ValueError: its groups have other sizes than this optimizer's.
        """
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != [len(names) for names in self.groups]:
            raise ValueError(
                f"The checkpoint's {type(self.optimizer).__name__} has parameter groups of sizes {sizes}, this run's"
                f" has {[len(names) for names in self.groups]}. Resume with the optimizer that saved it."
            )
        local: dict[int, Any] = {}
        groups, count = [], 0
        for group, names in zip(state["param_groups"], self.groups, strict=True):
            own = [(index, n) for index, n in zip(group["params"], names, strict=True) if self.table.owns(n)]
            kept = {
                count + i: _to_host(self.tensor.part_of_state(name, state["state"][index]))
                for i, (index, name) in enumerate(own)
                if index in state["state"]
            }
            local.update(kept)
            groups.append({**group, "params": list(range(count, count + len(own)))})
            count += len(own)
        taken = {"state": local, "param_groups": groups}
        if load is not None:
            load(taken)
            return
        with exposed(self.optimizer):
            self.optimizer.load_state_dict(taken)


def full_state_dict(
    state: Mapping[str, Any], table: ParameterTable, gather: Gather, tensor: Uncut | None = None
) -> dict[str, Any]:
    """A state dict of the model, or of a copy of it, as one process would have it, on the host.

    Parameters come from the first stage that holds them, buffers of units from their stage, other buffers and extra
    state from the gathering rank.

    Args:
        state: this rank's state dict, with stand-ins for what other stages hold.
        table: the parameters.
        gather: gathers an object of every rank on one of them.
        tensor: how parameters are cut over the tensor axis, all of whose ranks call this.

    Returns:
        The state dict; empty off the gathering rank.
    """
    parts = gather(own_state_dict(state, table, tensor))
    if parts is None:
        return {}
    merged = {name: value for part in parts for name, value in part.items()}
    return {name: merged.get(name) for name in state}


def own_state_dict(state: Mapping[str, Any], table: ParameterTable, tensor: Uncut | None = None) -> dict[str, Any]:
    """This stage's part of a state dict of the model, on the host; every name is in exactly one stage's part.

    `tensor` makes whole what the tensor axis cut; None leaves this rank's part of it.
    """
    tensor = tensor or Uncut()
    return {
        name: _to_host(tensor.whole(name, value) if isinstance(value, Tensor) else value)
        for name, value in state.items()
        if _owner(name, table) == table.row
    }


def load_full_state_dict(
    model: nn.Module, table: ParameterTable, state: Mapping[str, Any], strict: bool, tensor: Uncut | None = None
) -> None:
    """Load this rank's part of a full state dict.

    Raises:
        RuntimeError: in strict mode, keys are missing or unexpected (the text of `nn.Module.load_state_dict`).
    """
    mine = model.state_dict()
    foreign = {
        name
        for name, value in mine.items()
        if isinstance(value, Tensor) and (value.is_meta or isinstance(value, Phantom))
    }
    missing, unexpected = [k for k in mine if k not in state], [k for k in state if k not in mine]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(model).__name__}: missing key(s) {missing}, unexpected key(s)"
            f" {unexpected}."
        )
    part = (tensor or Uncut()).part
    model.load_state_dict(
        {
            name: part(name, value) if isinstance(value, Tensor) else value
            for name, value in state.items()
            if name in mine and name not in foreign
        },
        strict=False,
    )


def _owner(name: str, table: ParameterTable) -> int:
    """The row from which a name's value is taken: what belongs to no unit, from the last stage's, where steps end."""
    if name in table.by_name:
        return table.by_name[name].rows[0]
    unit = next((unit for unit in table.layout.units if name.startswith(f"{unit.name}.")), None)
    return table.holders[-1 if unit is None else unit.stage][0]


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _to_host(entry) for key, entry in value.items()}
    return value
