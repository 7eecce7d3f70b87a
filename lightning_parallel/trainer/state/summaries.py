"""Lightning's summary of the model counts whole parameters where ranks hold parts of them.

The one idea: a summary asks every parameter for its `numel()`, in a callback's `on_fit_start` and nowhere else. There,
and for that long, a parameter that the tensor axis cut answers for the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.callbacks import ModelSummary

from lightning_parallel.parallel.uncut import Uncut

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def count_whole(trainer: Trainer) -> None:
    """Let a Trainer's summaries count the whole model. Its strategy's `tensor` says what is cut."""
    for callback in cast(Any, trainer).callbacks:
        if isinstance(callback, ModelSummary) and "on_fit_start" not in vars(callback):
            callback.on_fit_start = partial(_on_fit_start, callback)  # type: ignore[method-assign]


def _on_fit_start(callback: ModelSummary, trainer: Trainer, module: LightningModule) -> None:
    with _whole_counts(module, getattr(trainer.strategy, "tensor", Uncut())):
        type(callback).on_fit_start(callback, trainer, module)


@contextmanager
def _whole_counts(module: LightningModule, tensor: Uncut) -> Iterator[None]:
    cut = [(p, tensor.shares[name]) for name, p in module.named_parameters() if name in tensor.shares]
    for parameter, shares in cut:
        parameter.numel = partial(prod, shares.shape)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for parameter, _ in cut:
            parameter.__dict__.pop("numel", None)
