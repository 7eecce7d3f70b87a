"""The part of a model that one rank holds: taken out of the whole, initialized, and moved.

The one idea: the parameters of other stages give way to stand-ins before anything is made, and what is made is equal
where several ranks hold it. Left out: gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_parallel.checkpoint.weights import load_noted
from lightning_parallel.parallel.uncut import Uncut
from lightning_parallel.pipeline.parameters.deferred_init import make_in_parts, materialize
from lightning_parallel.pipeline.parameters.early_cuts import EarlyCuts
from lightning_parallel.pipeline.parameters.shared_parameters import SharedParameters
from lightning_parallel.pipeline.parameters.table import ParameterTable
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.pipeline.stage.random_streams import RandomStreams, mix
from lightning_parallel.pipeline.transport.axis_line import AxisLine


class OwnPart(SharedParameters):
    """A copy of a model of which this rank holds a part.

    Attributes:
        model: the whole model; what other ranks hold of it is freed.
        tensor: the ranks of this row along the tensor axis.
        foreign: what stands for the parameters of other ranks.
    """

    model: nn.Module
    tensor: AxisLine
    foreign: list[ForeignParameter]
    _all: list[nn.Parameter]  # own and foreign, in the table's order
    _over_tensor: Uncut
    _divide: Callable[[Sequence[nn.Parameter]], None] | None

    def _take_parameters(self) -> RandomStreams:
        """Keep and initialize this rank's part of the model, equal where several ranks hold it; the copy's streams."""
        _refuse_other_cut(self.table)
        seed = self._agree_on_seed()
        self.table.drop_foreign(self.device)
        self._cuts = EarlyCuts(self._over_tensor, self.tensor)
        divided = set[nn.Parameter]()
        if self._divide is not None and self.data.size > 1 and self.num_replicas == 1:
            cuts = self._cuts.made
            divided = make_in_parts(self.table, self.device, seed, self._divide, cuts, self._over_tensor.part)
        materialize(self.table, self.device, seed, made=self._cuts.made)
        load_noted(self.model, self._over_tensor.part, divided)
        self.own = list(self.table.own())
        self.foreign = [parameter for parameter in self.model.parameters() if isinstance(parameter, ForeignParameter)]
        self._all = [self.model.get_parameter(entry.name) for entry in self.table.entries]
        self._cuts.take(self.own, self.device, divided)
        self.to_device(self.device)
        self._groups = self._open_groups()
        self._equalize(divided)
        if divided and self._divide is not None:
            self._divide([parameter for _, parameter in self.own if parameter not in divided])
        self._over_tensor.cut()
        return RandomStreams(mix(seed, self.data.place) if self.data.place else seed, self.device)

    def _agree_on_seed(self) -> int:
        """A seed that all ranks of all copies have."""
        seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)])
        self.broadcast(seed)
        self.data.equalize([seed])
        self.tensor.equalize([seed])
        return int(seed)

    def _equalize(self, divided: set[nn.Parameter]) -> None:
        """What several ranks hold begins equal; what is divided was made so."""
        self._equalize_shared()
        self.tensor.equalize(self.own_buffers())
        self.data.equalize([p.data for _, p in self.own if p not in divided] + self.own_buffers())

    def to_device(self, device: torch.device) -> None:
        """Move this rank's parameters (and their gradients) and buffers."""
        for _, parameter in self.own:
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and not isinstance(buffer, Phantom):
                    module._buffers[name] = buffer.to(device)

    def own_buffers(self) -> list[Tensor]:
        """The buffers that this rank holds."""
        return [buffer for buffer in self.model.buffers() if not buffer.is_meta and not isinstance(buffer, Phantom)]


def _refuse_other_cut(table: ParameterTable) -> None:
    gone = [entry for entry, parameter in table.own() if isinstance(parameter, ForeignParameter)]
    if gone:
        raise ValueError(
            f"This process gave `{gone[0].name}` and {len(gone) - 1} other parameters of stage {gone[0].stages[0]}"
            " away when the module was cut before, for another number of stages or another partition. Build the module"
            " anew and load a checkpoint."
        )
