"""Loggers and progress bars get on rank 0 what one process gives them, and write once."""

import csv
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.trainer.conformance.runs import Memory, OnRankZero, Run, Suite, core
from tests.trainer.modules import Classifier, row_loader

RAGGED = (8, 5, 8, 3)


class Described(Classifier):
    """Saves its arguments and logs beside losses, also by the logger's own ways."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_train_start(self) -> None:
        self.logger.log_hyperparams({"note": "by hand"})

    def on_train_epoch_end(self) -> None:
        self.logger.log_metrics({"by_hand": float(self.current_epoch)}, step=self.global_step)


def fit(run: Run, logger: Any, **options: Any) -> None:
    trainer = run.trainer(logger=logger, max_epochs=2, log_every_n_steps=2, **options)
    trainer.fit(Described(), row_loader(RAGGED), row_loader((5, 8)))


@core
def a_logger(run: Run) -> Any:
    logger = Memory()
    fit(run, logger)
    return OnRankZero((logger.rows, logger.parameters))


def csv_logger(run: Run) -> Any:
    fit(run, CSVLogger(run.folder, name="csv"))
    files = sorted(str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file())
    with open(run.folder / "csv" / "version_0" / "metrics.csv") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return OnRankZero((files, rows))  # written whole when rank 0's fit has ended


def tensorboard_logger(run: Run) -> Any:
    fit(run, TensorBoardLogger(run.folder, name="board", default_hp_metric=False))
    events = EventAccumulator(str(run.folder / "board" / "version_0"))
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])}
    return OnRankZero((scalars, (run.folder / "board" / "version_0" / "hparams.yaml").read_text()))


class Experiment(Classifier):
    """Writes to the experiment itself, from within a step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.logger.experiment.add_scalar("inside", self.global_step, self.global_step)
        return loss


def experiment_inside_a_step(run: Run) -> Any:
    logger = TensorBoardLogger(run.folder, name="board", default_hp_metric=False)
    run.trainer(logger=logger, max_epochs=1).fit(Experiment(), row_loader(RAGGED), row_loader((5,)))
    events = EventAccumulator(str(run.folder / "board" / "version_0"))
    events.Reload()
    return {event.step for event in events.Scalars("inside")}


def bar(make: Callable[[], ProgressBar]) -> Callable[[Run], Any]:
    """What a progress bar shows: its metrics after every batch and at the end."""

    def scenario(run: Run) -> Any:
        shown: list[Any] = []

        class Shows(type(make())):  # type: ignore[misc]
            def get_metrics(self, trainer: Any, module: Any) -> Any:
                shown.append(super().get_metrics(trainer, module))
                return shown[-1]

        trainer = run.trainer(Shows(), max_epochs=2, enable_progress_bar=True)
        trainer.fit(Classifier(), row_loader(RAGGED), row_loader((5, 8)))
        trainer.validate(Classifier(), row_loader((5, 8)), verbose=False)
        return OnRankZero(shown[-1:]), trainer.progress_bar_callback.total_train_batches

    scenario.__name__ = f"bar_of_{make.__name__}"
    return scenario


suite = Suite(
    a_logger, csv_logger, tensorboard_logger, experiment_inside_a_step, bar(TQDMProgressBar), bar(RichProgressBar)
)


@suite.for_each_strategy
def test_as_in_one_process(entry, scenario, tmp_path):
    suite.check(entry, scenario, tmp_path)
