"""fit, validate, test and predict, in every order and with every limit, are those of one process."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from tests.trainer.conformance.runs import OnRankZero, Run, Suite, core
from tests.trainer.modules import Classifier, row_dataset, row_loader

RAGGED = (8, 5, 8, 3, 8, 1)


class Whole(Classifier):
    """A classifier with every kind of step; notes which validation batches it saw."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch), on_step=True, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])


class Calls(Callback):
    """Notes the hooks around evaluation and training, with the step they fall on."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_sanity_check_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seen.append(("sanity", trainer.global_step))

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seen.append(("validated", trainer.global_step))

    def on_validation_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int, loader: int = 0) -> None:
        self.seen.append((f"batch {index} of {loader}", trainer.global_step))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seen.append(("epoch", trainer.global_step))


class Writer(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, *at: int
    ) -> None:
        self.batches.append((prediction, indices, at))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = (predictions, indices)


@core
def fit_with_sanity_check(run: Run) -> Any:
    calls = Calls()
    run.trainer(calls, max_epochs=2, num_sanity_val_steps=2).fit(Whole(), row_loader(RAGGED), row_loader((5, 8, 3)))
    return calls.seen


def validation_between_steps(run: Run) -> Any:
    seen = []
    for options in ({"val_check_interval": 2}, {"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2}):
        calls = Calls()
        trainer = run.trainer(calls, max_epochs=3, num_sanity_val_steps=0, **options)
        trainer.fit(Whole(), row_loader(RAGGED), row_loader((5,)))
        seen.append(calls.seen)
    trainer = run.trainer(calls, max_steps=7, val_check_interval=4, check_val_every_n_epoch=None)
    trainer.fit(Whole(), row_loader(RAGGED), row_loader((5,)))
    return seen


def validate_and_test(run: Run) -> Any:
    trainer, module = run.trainer(), Whole()
    found = [trainer.validate(module, row_loader(RAGGED), verbose=False)]
    found.append(trainer.test(module, row_loader((3, 8)), verbose=False))
    return found, trainer.validate(module, row_loader((2,)), verbose=False)


def predict_rows_once_and_in_order(run: Run) -> Any:
    trainer, module = run.trainer(), Whole()
    return OnRankZero(trainer.predict(module, [row_dataset(29, 8), row_loader((3, 1))]))


def prediction_writer(run: Run) -> Any:
    writer = Writer()
    trainer = run.trainer(writer)
    trainer.predict(Whole(), row_dataset(29, 8), return_predictions=False)
    nothing = any(prediction is None for prediction, _, _ in writer.batches)  # it is not asked to write that
    return nothing, OnRankZero((writer.batches, writer.epoch))


def fast_dev_run(run: Run) -> Any:
    trainer = run.trainer(fast_dev_run=2)
    trainer.fit(Whole(), row_loader(RAGGED), row_loader((5, 8, 3)))
    return trainer.global_step


def overfit_batches(run: Run) -> Any:
    trainer = run.trainer(overfit_batches=2, max_epochs=3)
    trainer.fit(Whole(), row_dataset(29, 8), row_dataset(16, 8))
    return trainer.global_step


def limits(run: Run) -> Any:
    trainer, module = (
        run.trainer(limit_train_batches=4, limit_val_batches=0.5, limit_test_batches=1, max_epochs=2),
        Whole(),
    )
    trainer.fit(module, row_loader(RAGGED), row_loader((5, 8, 3, 2)))
    return trainer.test(module, row_loader((8, 4)), verbose=False)


def limited_by_steps_and_epochs(run: Run) -> Any:
    done = []
    for options in ({"max_steps": 4}, {"max_epochs": 3, "min_epochs": 2}, {"max_steps": 4, "max_epochs": 1}):
        trainer = run.trainer(**options, limit_train_batches=3)
        trainer.fit(Whole(), row_loader(RAGGED), row_loader((5,)))
        done.append((trainer.global_step, trainer.current_epoch))
    return done


def fit_twice(run: Run) -> Any:
    """By one Trainer and by a second one, with the same module."""
    trainer, module = run.trainer(max_epochs=1), Whole()
    trainer.fit(module, row_loader(RAGGED), row_loader((5,)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, row_loader(RAGGED), row_loader((5,)))
    again = run.trainer(max_steps=2)
    again.fit(module, row_loader((8, 8)), row_loader((5,)))
    return again.validate(module, row_loader((6,)), verbose=False)


@core
def fit_test_predict(run: Run) -> Any:
    trainer, module = run.trainer(max_epochs=1), Whole()
    trainer.fit(module, row_loader(RAGGED), row_loader((5,)))
    tested = trainer.test(module, row_loader((3, 8)), verbose=False)
    return tested, OnRankZero(trainer.predict(module, row_loader((3,))))


def several_validation_loaders(run: Run) -> Any:
    trainer, module = run.trainer(max_epochs=2), Whole()
    trainer.fit(module, row_loader(RAGGED), [row_loader((5,)), row_loader((8, 3), seed=1)])
    return trainer.test(module, [row_loader((5,)), row_loader((8, 3), seed=1)], verbose=False)


class Both(Whole):
    """Takes a dict of batches of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (torch.cat(parts) for parts in zip(batch["a"], batch["b"], strict=True))
        return super().training_step((x, y), batch_idx)


def several_training_loaders(run: Run) -> Any:
    loaders = {"a": row_loader((4, 8, 4)), "b": row_loader((4, 8, 4), seed=1)}
    trainer = run.trainer(max_epochs=2)
    trainer.fit(Both(), CombinedLoader(loaders, "max_size_cycle"), row_loader((5,)))
    return trainer.global_step


class Reloads(Whole):
    """Its loader has more rows every epoch."""

    def train_dataloader(self) -> Any:
        return row_dataset(20 + 4 * self.current_epoch, 8)

    def val_dataloader(self) -> Any:
        return [row_loader((5,))]


def loaders_made_anew(run: Run) -> Any:
    trainer = run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Reloads())
    return trainer.global_step


suite = Suite(
    fit_with_sanity_check, validation_between_steps, validate_and_test, predict_rows_once_and_in_order,
    prediction_writer, fast_dev_run, overfit_batches, limits, limited_by_steps_and_epochs, fit_twice, fit_test_predict,
    several_validation_loaders, several_training_loaders, loaders_made_anew,
)  # fmt: skip


@suite.for_each_strategy
def test_as_in_one_process(entry, scenario, tmp_path):
    suite.check(entry, scenario, tmp_path)
