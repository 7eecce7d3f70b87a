"""What a run of a stage has of units' results: those that came in, and those that are handed on.

The one idea: a unit's result has a name (`Leaf`), whichever stage made it. Where a stage needs one that it did not
make, it is fetched by its name, and what was fetched is what the stage needs. Results that are handed on leave when the
run is over, and the step may write into them meanwhile: that is noticed, or a copy leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline.phantoms.phantom import Phantom, phantoms_in, with_values
from lightning_parallel.pipeline.phantoms.stand_in import Leaf, version_of
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
