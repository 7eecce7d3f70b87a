"""Values of the progress bar, read from the device when they are shown.

The one idea: what a step logs with `prog_bar=True` Lightning turns into a number after every batch, which waits for all
that the device was asked to do; so the host never runs ahead of it, and the device waits for the host in turn. Here the
tensor is kept, and becomes a number when a progress bar (or whoever reads `trainer.progress_bar_metrics`) asks for it.
A Lightning that has changed these methods is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_CONVERT = "convert_tensors_to_scalars"


class _ReadWhenShown(_LoggerConnector):
    @property
    def metrics(self) -> Any:
        with _kept_as_tensors():
            return super().metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        self._progress_bar_metrics = convert_tensors_to_scalars(super().progress_bar_metrics)
        return self._progress_bar_metrics


def read_when_shown(trainer: Trainer) -> Callable[[bool], None]:
    """Have a Trainer read values of the progress bar when they are shown.

    Returns:
        What undoes it; told whether the run has failed, after which a device may never answer.
    """
    connector: Any = trainer._logger_connector
    if type(connector) is not _LoggerConnector or getattr(result, _CONVERT, None) is not convert_tensors_to_scalars:
        return lambda failed: None
    connector.__class__ = _ReadWhenShown

    def undo(failed: bool) -> None:
        connector.__class__ = _LoggerConnector
        connector._progress_bar_metrics = {} if failed else convert_tensors_to_scalars(connector._progress_bar_metrics)

    return undo


@contextmanager
def _kept_as_tensors() -> Iterator[None]:
    setattr(result, _CONVERT, lambda value: value)
    try:
        yield
    finally:
        setattr(result, _CONVERT, convert_tensors_to_scalars)
