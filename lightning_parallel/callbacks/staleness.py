"""Log how old weights are when updates made from them are applied, beside the bounds of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_parallel.measure.staleness import Access, StalenessReading, StalenessSums
from lightning_parallel.measure.staleness_picture import draw_staleness


class VersionSource(Protocol):
    """``trainer.strategy.versions`` of a strategy whose ranks read and write versions of weights."""

    num_workers: int
    staleness: int | None

    def take(self) -> Sequence[Access]:
        """This rank's iterations since the last call."""

    def everyone(self, value: Any) -> list[Any]:
        """The values of all ranks; every rank calls it."""


class StalenessMonitor(Callback):
    """Logs what workers read and wrote to every logger, at the end of every epoch, where workers meet.

    Keys, each the same number on every rank and of all workers together, since the beginning of the fit:

    * ``parallel/staleness_mean``, ``_max``: updates of other workers between a worker's read and the moment its own
      update was applied, beside ``_max_bound``, (P - 1)(2 s + 1);
    * ``parallel/staleness_gap_mean``, ``_gap_max``: clocks between a reader and the slowest worker at a read, beside
      ``_gap_bound``, s;
    * ``parallel/staleness_waited_seconds``, and ``.../rank_r``: what reads took, waiting and transfer;
    * ``parallel/staleness_dropped``: updates that were thrown away as too old;
    * ``parallel/staleness_pushed_bytes``, ``_pulled_bytes``, ``_saved_bytes``: moved by workers, and saved by filters;
    * ``parallel/staleness_regret_bound``: 4 F L sqrt(2 (s + 1) P / T), the most average regret of the T updates so far.

    Bounds are there where the rule has one. Steps wait for nothing: a worker keeps its numbers until the epoch's end.
    A worker that died took its own along.

    Args:
        picture: rank 0 writes a PNG of the two histograms here when the training ends; None writes none.
        distance: F of the bound on the regret.
        lipschitz: L of it.

    Raises:
        ValueError: a number is not above 0; at setup, the Trainer's strategy has no versions.

    Example::

        monitor = StalenessMonitor(picture="staleness.png")
        trainer = Trainer(strategy="ssp", devices=4, callbacks=[monitor])
        trainer.fit(model)
        print(monitor.summary())

    Source:
        Ho et al., NIPS 2013 (the gap, the regret); Dai et al., AAAI 2015 (the age of updates).
    """

    measured_attributes = ("reading",)  # rank 0's come back from forked ranks

    def __init__(self, picture: str | Path | None = None, distance: float = 1.0, lipschitz: float = 1.0) -> None:
        for name, value in (("distance", distance), ("lipschitz", lipschitz)):
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{type(self).__name__}({name}={value!r}) needs a number above 0.")
        self.picture, self.distance, self.lipschitz = picture, distance, lipschitz
        self.reading: StalenessReading | None = None
        self._own = StalenessSums()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy in which nothing is stale."""
        if not hasattr(trainer.strategy, "versions"):
            raise ValueError(
                f"{type(self).__name__} measures versions of weights, and the Trainer uses"
                f' {type(trainer.strategy).__name__}, which has one. Use Trainer(strategy="ssp", ...), or remove the'
                " callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last ``fit``."""
        self.reading, self._own = None, StalenessSums()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the workers' numbers together, and log them."""
        source = cast(VersionSource | None, cast(Any, trainer.strategy).versions)
        if source is None:  # a module without an optimizer
            return
        source.everyone(None)  # now all updates of the epoch are in
        self._own += StalenessSums.of(source.take())
        everyone = dict(source.everyone((trainer.global_rank, self._own)))
        workers = {rank: sums for rank, sums in everyone.items() if sums.reads} or everyone  # others do not read alone
        self.reading = StalenessReading(workers, source.staleness, self.distance, self.lipschitz)
        metrics = {key: torch.tensor(value, dtype=torch.float64) for key, value in self.reading.metrics().items()}
        pl_module.log_dict(metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw."""
        if self.picture is not None and self.reading is not None and trainer.is_global_zero:
            Path(self.picture).parent.mkdir(parents=True, exist_ok=True)
            draw_staleness(self.picture, self.reading)

    def summary(self) -> str:
        """The last ``fit`` in words: the most and the mean, beside the bounds."""
        return "staleness: no epoch has ended" if self.reading is None else self.reading.summary()
