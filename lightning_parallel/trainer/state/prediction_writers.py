"""`BasePredictionWriter` on ranks that have no predictions: it is not asked to write there.

The one idea: predictions exist where steps end, once for every row; another rank of the same copy has none to write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.callbacks import BasePredictionWriter

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_WRITES = ("write_on_batch_end", "write_on_epoch_end")


def hold_writers(trainer: Trainer, has_predictions: bool) -> None:
    """Let a Trainer's writers write nothing on a rank that has no predictions."""
    for writer in _writers(trainer) if not has_predictions else ():
        writer.__dict__.update(dict.fromkeys(_WRITES, _writes_nothing))


def let_writers_go(trainer: Trainer) -> None:
    """Undo `hold_writers`."""
    for writer in _writers(trainer):
        for name in _WRITES:
            if writer.__dict__.get(name) is _writes_nothing:
                del writer.__dict__[name]


def _writes_nothing(*args: Any, **kwargs: Any) -> None:
    """This rank has no predictions."""


def _writers(trainer: Trainer) -> list[BasePredictionWriter]:
    callbacks: list[Any] = cast(Any, trainer).callbacks
    return [callback for callback in callbacks if isinstance(callback, BasePredictionWriter)]
