"""Parameters are cut over the tensor axis one by one, so that a rank never holds its stages whole.

The one idea: a parameter that has just been made is equal on all ranks by its seed, and is cut before the next module
gets memory. One that had memory before is moved to the device, made equal there, and cut before the next one is moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from lightning_parallel.parallel.uncut import Uncut
from lightning_parallel.pipeline.parameters.table import ParameterEntry
from lightning_parallel.pipeline.transport.axis_line import AxisLine


class EarlyCuts:
    """The cuts of one rank.

    Args:
        over: says what is cut.
        line: the ranks of the axis.

    Attributes:
        done: the parameters that were cut when they were made.
    """

    def __init__(self, over: Uncut, line: AxisLine) -> None:
        self._over, self._line, self.done = over, line, set[nn.Parameter]()

    def made(self, name: str, parameter: nn.Parameter) -> None:
        """A parameter was made: leave this rank's part of it."""
        whole, parameter.data = parameter.data, self._over.part(name, parameter.data)
        if parameter.shape != whole.shape:
            self.done.add(parameter)

    def take(
        self,
        own: Iterable[tuple[ParameterEntry, nn.Parameter]],
        device: torch.device,
        but: Collection[nn.Parameter] = (),
    ) -> None:
        """Leave this rank's part of its other parameters, on the device.

        Args:
            own: this rank's parameters.
            device: where they are to be.
            but: those that are equal on all ranks already.
        """
        if self._line.size == 1:
            return
        for entry, parameter in own:
            if parameter not in but and parameter not in self.done:
                parameter.data = parameter.data.to(device)
                self._line.equalize([parameter.data])
                parameter.data = self._over.part(entry.name, parameter.data)
