"""What the loss stage logged comes to every rank, over the host.

The one idea: what is logged (names, options) travels whole only when it is new; the numbers travel as one vector.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.runtime.assembly import Pipeline
from lightning_parallel.pipeline.transport.readback import Readback
from lightning_parallel.trainer.step.step_log import LogCall, dtype_of

_VOID = "nothing came of the step"
Structure = tuple[torch.dtype | None, list[Any]]  # of the loss; of every call its name, options, dtype and metric


class StepIsVoid(Exception):
    """A step called stages as it was not expected to: nothing came of it, on no rank."""


class LogSpreader:
    """Brings the loss stage's loss and joined log calls to every rank, over the host.

    What is logged (names, options) travels whole only when it is new. On CPU it sets out as soon as the last forward
    ran; on a device the values are read at the end of the step, which waits for the forwards and no more. They stay on
    the host, where progress bars and loggers read them without waiting for the device.

    Args:
        pipeline: what tells and waits.
        hear: receives what was told.
    """

    def __init__(self, pipeline: Pipeline, hear: Callable[[], Any]) -> None:
        self._pipeline, self._hear = pipeline, hear
        self._structures: list[Structure] = []
        self._readback: Readback | None = None
        # Lightning's advice for ranks that see different rows; here every rank logs the loss stage's value.
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")

    def announce(self, loss: Tensor | None, calls: list[LogCall]) -> None:
        """On the loss stage, as soon as its forwards are launched: the values to tell."""
        values = [0.0 if loss is None else loss, *(call.value for call in calls)]
        self._readback = Readback(_stack(values, self._pipeline.device))
        if self._pipeline.device.type == "cpu":
            self._tell(loss, calls)

    def send(self, loss: Tensor | None, calls: list[LogCall]) -> None:
        """On the loss stage, at the end of its step, with what was announced: values go out and into the calls."""
        if self._readback is not None:
            self._tell(loss, calls)

    def receive(self) -> tuple[Tensor, list[LogCall]]:
        """On every other rank, at the end of its step: the loss stage's loss and calls.

        Raises:
            StepIsVoid: there are none.
        """
        told, numbers = self._hear()
        if told == _VOID:
            raise StepIsVoid
        if not isinstance(told, int):
            self._structures.append(told)
            told = -1
        dtype, structure = self._structures[told]
        calls = [LogCall(name, None, options, kind, metric) for name, options, kind, metric in structure]
        _assign(numbers[1:], calls)
        return torch.full((), numbers[0], dtype=dtype, device=self._pipeline.device), calls

    def announce_void(self) -> None:
        """On the loss stage, in place of all this: nothing came of the step."""
        self._pipeline.settle()
        self._pipeline.tell((_VOID, []))

    def _tell(self, loss: Tensor | None, calls: list[LogCall]) -> None:
        assert self._readback is not None
        mine: Structure = (dtype_of(loss), [(call.name, call.options, call.dtype, call.metric) for call in calls])
        known = mine in self._structures
        if not known:
            self._structures.append(mine)
        numbers = self._readback.wait(self._pipeline.waiting).tolist()
        self._readback = None
        self._pipeline.settle()
        self._pipeline.tell((self._structures.index(mine) if known else mine, numbers))
        _assign(numbers[1:], calls)


def _stack(values: list[Any], device: torch.device) -> Tensor:
    """Numbers and scalar tensors as one float64 vector, without waiting for the device."""
    stacked = torch.zeros(len(values), dtype=torch.float64, device=device)
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            stacked[i] = value.detach()
        elif value:
            stacked[i].fill_(float(value))
    return stacked


def _assign(numbers: Sequence[float], calls: list[LogCall]) -> None:
    """Give each call its value, a tensor on the host."""
    for number, call in zip(numbers, calls, strict=True):
        if call.metric is None or call.dtype is not None:
            call.value = torch.tensor(number, dtype=call.dtype)
