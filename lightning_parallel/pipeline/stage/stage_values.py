"""What a run of a stage takes in and hands on: units' results, the first block's arguments, the next stage's.

The one idea: a unit's result has a name (`Leaf`), whichever stage made it. Where a stage needs one that it did not
make, it is fetched by its name, and what was fetched is what the stage needs. Results that are handed on leave when the
run is over, and the step may write into them meanwhile: that is noticed, or a copy leaves.

`StageValues` has the results, `StageEntry` makes the Phantoms among the first block's arguments values, `StageExit`
says what of the next block's arguments may be sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline.partition.layout import Unit
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from lightning_parallel.pipeline.phantoms.phantom import Phantom, bound, phantoms_in, with_values
from lightning_parallel.pipeline.phantoms.stand_in import Leaf, version_of
from lightning_parallel.pipeline.stage import calls
from lightning_parallel.pipeline.transport.tensor_meta import realize

Place = int | Leaf  # where a value between stages belongs: a position among arguments, or a unit's result


class StageValues:
    """Results of units in one run.

    Args:
        inputs: received values; results of units are those by `Leaf`.
        keep: what is handed on, see `StageRun`; None for no results.
        learn: nobody knows yet what is needed: everything is handed on.

    Attributes:
        wanted: what was fetched of what came in, in order.
        aside: results that are handed on.
        versions: how often what is handed on had been written to when it was set aside.
    """

    def __init__(self, inputs: Mapping[Place, Tensor], keep: Collection[Place] | None, learn: bool) -> None:
        self.inputs, self.keep, self.learn = inputs, keep, learn
        self.wanted: dict[Leaf, None] = {}
        self.aside: dict[Leaf, Tensor] = {}
        self.versions: dict[Place, int] = {}
        self._made: dict[Leaf, Tensor] = {}
        for place, value in inputs.items():
            if isinstance(place, tuple):
                self.put(place, value)

    def put(self, leaf: Leaf, tensor: Tensor) -> None:
        """Keep a result as it is now."""
        self._made[leaf] = tensor
        if self.learn:
            self.aside[leaf] = tensor
        elif leaf in (self.keep or ()):  # the step may write into it; a copy, where nothing saves it
            self.aside[leaf] = tensor if torch.is_grad_enabled() else tensor.clone()
            self.versions[leaf] = version_of(tensor)

    def put_all(self, unit: str, result: Any) -> None:
        """Keep what a unit returned for the stages that want it (as long as they are not known, for all)."""
        tensors = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        for number, tensor in enumerate(tensors):
            if self.learn or (unit, number) in (self.keep or ()):
                self.put((unit, number), tensor)

    def fetch(self, leaf: Leaf) -> Tensor | None:
        """What a unit of an earlier stage returned, if it came in."""
        value = self._made.get(leaf)
        if value is not None and leaf in self.inputs:
            self.wanted[leaf] = None
        return value

    def realized(self, tree: Any) -> Any:
        """A structure with the values of its Phantoms, fetched and computed where they can be."""
        for phantom in phantoms_in(tree) if isinstance(tree, (Tensor, tuple)) else tree_flatten(tree)[0]:
            if isinstance(phantom, Phantom) and phantom.value is None:
                realize(phantom, self.fetch)
        return with_values(tree)

    def written(self, outputs: Mapping[Place, Any], places: Iterable[Place]) -> Place | None:
        """The first of the outputs that is not what it was when it was set aside."""
        for place in places:
            version = self.versions.get(place)
            if version is not None and version_of(outputs[place]) != version:
                return place
        return None


class NotSent(PhantomError):
    """An argument of the first block is neither there nor can it be computed."""


class StageEntry:
    """The first block's arguments, call by call.

    Args:
        stage: which stage begins.
        stage_values: what came in.
        made_for: see `StageRun`.

    Attributes:
        needed: positions of the arguments that were Phantoms and came in their places, in order.
        by_position: units' results among them.
        lent: other stages' parameters among them, and their values.
    """

    def __init__(self, stage: int, stage_values: StageValues, made_for: Collection[int]) -> None:
        self.stage, self.stage_values, self._made_for = stage, stage_values, made_for
        self.needed: tuple[int, ...] | None = () if stage == 0 else None
        self.by_position: set[Leaf] = set()
        self.lent: list[tuple[ForeignParameter, Tensor]] = []
        self._grad = torch.is_grad_enabled()
        self._starts = [0]  # leaves of the arguments before the first call, the second one, ...

    def enter(self, unit: Unit, arguments: Any, before_this: int, replaying: bool, finding: bool) -> None:
        """Bind the Phantoms among arguments of a call to what was sent, or to what that gives.

        Raises:
            NotSent: that is not possible (for the first call, or where calls are being found out).
            PhantomError: they carry gradients where there shall be none.
        """
        inputs, is_first = self.stage_values.inputs, not before_this
        lacking = self._lacking(arguments, before_this, replaying)
        sent = {p: x for p, x in lacking.items() if is_first and p in inputs and p not in self._made_for}
        self._bind(sent)
        unknown = {p: x for p, x in lacking.items() if p not in sent and realize(x, self.stage_values.fetch) is None}
        missing = [str(leaf.origin) for position, leaf in unknown.items() if position not in inputs]
        if missing and (is_first or finding):
            raise NotSent(calls.not_sent(unit, self.stage, missing))
        self._bind({position: leaf for position, leaf in unknown.items() if position in inputs})
        needed = {p: x for p, x in lacking.items() if p in inputs and (p in sent or p in unknown)}
        taken = lacking if is_first else needed
        carry_gradients = any(x.value is not None and x.value.requires_grad for x in taken.values())
        if self._grad and not torch.is_grad_enabled() and carry_gradients:
            raise PhantomError(calls.without_gradients(unit, self.stage))
        if not replaying:
            self.needed = (*(self.needed or ()), *needed)

    def _bind(self, sent: Mapping[int, Phantom]) -> None:
        """Let Phantoms stand for what was sent in their places."""
        for position, phantom in sent.items():
            value = self.stage_values.inputs[position]
            phantom.bind(value)
            if phantom.leaf is not None:
                self.stage_values.put(phantom.leaf, value)
                self.by_position.add(phantom.leaf)
            if isinstance(phantom, ForeignParameter):
                self.lent.append((phantom, value))

    def _lacking(self, arguments: Any, before_this: int, replaying: bool) -> dict[int, Phantom]:
        """The Phantoms among the arguments, by position; positions go on from call to call."""
        leaves, start = tree_flatten(arguments)[0], self._starts[before_this]
        lacking: dict[int, Phantom] = {}
        for position, leaf in enumerate(leaves, start):
            if isinstance(leaf, Phantom) and leaf.value is None and not any(leaf is x for x in lacking.values()):
                lacking[position] = leaf
        if not replaying:
            self._starts.append(start + len(leaves))
        return lacking


class StageExit:
    """What may be sent, call by call of the next stage's first block.

    Args:
        stage_values: what came in and what units made.

    Attributes:
        outputs: leaves of the arguments by position, and units' results by `Leaf`; None before the first call.
        wanted_for: what of earlier units was needed for nothing but an output, by its position.
    """

    def __init__(self, stage_values: StageValues) -> None:
        self.stage_values = stage_values
        self.outputs: dict[Place, Any] | None = None
        self.wanted_for: dict[int, tuple[Leaf, ...]] = {}
        self._left = 0  # leaves of the arguments so far

    def values_of(self, leaves: Sequence[Any]) -> list[Any]:
        """What is sent of a call's arguments; Phantoms stay where there is no value."""
        return [self._value_of(leaf, position) for position, leaf in enumerate(leaves, self._left)]

    def _value_of(self, leaf: Any, position: int) -> Any:
        """An argument's value, or nothing where the next stage can compute it."""
        stage_values = self.stage_values
        if not isinstance(leaf, Phantom):
            return leaf
        if (
            leaf.value is None
            and stage_values.keep is not None
            and not stage_values.learn
            and position not in stage_values.keep
        ):
            return None
        wanted, stage_values.wanted, noted = stage_values.wanted, {}, list[Phantom]()
        value = realize(leaf, stage_values.fetch, noted)
        if (
            stage_values.wanted and stage_values.keep is not None and stage_values.learn
        ):  # the next stage may compute it itself
            self.wanted_for[position] = tuple(stage_values.wanted)
            for phantom in noted:
                phantom.value = None
        else:
            wanted |= stage_values.wanted
        stage_values.wanted = wanted
        return bound(leaf) if value is None else value

    def watched(self, leaves: Sequence[Any]) -> list[Any]:
        """Values that are sent when the step has gone on. It may write into them; copies, where nothing saves them."""
        kept = [x if torch.is_grad_enabled() or not isinstance(x, Tensor) else x.clone() for x in leaves]
        versions = ((i, version_of(x)) for i, x in enumerate(kept, self._left) if isinstance(x, Tensor))
        self.stage_values.versions.update(versions)
        return kept

    def note(self, leaves: Sequence[Any]) -> None:
        """A call has been made; or, without arguments, a unit has returned something behind one."""
        self.outputs = self.outputs or {}
        self.outputs.update(enumerate(leaves, self._left))
        self.outputs.update(self.stage_values.aside.items())
        self._left += len(leaves)
