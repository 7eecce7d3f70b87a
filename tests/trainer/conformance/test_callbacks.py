"""Lightning's callbacks and tools around a fit do what they do in one process, on every rank alike.

Callbacks that hold weights are in ``test_weight_callbacks.py``; this library's own in ``test_pipeline_callbacks.py``.
"""

import inspect
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from tests.trainer.conformance.runs import Memory, OnRankZero, Run, Suite, core
from tests.trainer.modules import Classifier, row_loader

RAGGED = (8, 5, 8, 3)
# Lightning asks from version 2.6 on whether a checkpoint may hold objects.
TRUSTED = {"weights_only": False} if "weights_only" in inspect.signature(Trainer.fit).parameters else {}


@core
def checkpoints_by_a_monitor(run: Run) -> Any:
    name = "{epoch}-{step}-{val_loss:.2f}"
    best = ModelCheckpoint(run.folder, name, monitor="val_loss", save_top_k=2, save_last=True)
    often = ModelCheckpoint(
        run.folder / "often", "{step}", every_n_train_steps=3, save_top_k=-1, save_weights_only=True
    )
    trainer = run.trainer(
        best, often, EarlyStopping("val_loss", patience=1, min_delta=0.05), max_epochs=6, enable_checkpointing=True
    )
    trainer.fit(Classifier(), row_loader(RAGGED), row_loader((5, 8)))
    files = sorted(str(path.relative_to(run.folder)) for path in run.folder.rglob("*.ckpt"))
    scores = sorted(float(score) for score in best.best_k_models.values())
    [tested] = trainer.validate(Classifier(), row_loader((8,)), ckpt_path=best.best_model_path, verbose=False)
    return files, scores, float(best.best_model_score), trainer.global_step, tested


class Scheduled(Classifier):
    """A schedule over all steps of the run, whose number it asks for."""

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(
            [{"params": self.net[:4].parameters(), "name": "early"}, {"params": self.net[4:].parameters(), "lr": 0.2}],
            lr=0.1,
        )
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step", "name": "cycle"}}


@core
def schedules_and_their_monitor(run: Run) -> Any:
    logger, module = Memory(), Scheduled()
    monitor = LearningRateMonitor(log_momentum=True)
    trainer = run.trainer(monitor, logger=logger, max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(module, row_loader(RAGGED), row_loader((5,)))
    return module.steps, monitor.lrs, OnRankZero(logger.rows)


class Plateau(Classifier):
    """Schedulers per epoch, one of which watches a value that is logged in training."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        watching = {"scheduler": plateau, "monitor": "val_loss", "frequency": 1, "strict": True}
        return [optimizer], [watching, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def schedules_per_epoch(run: Run) -> Any:
    trainer = run.trainer(max_epochs=5)
    trainer.fit(Plateau(), row_loader(RAGGED), row_loader((5,)))
    return trainer.optimizers[0].param_groups[0]["lr"]


def timers(run: Run) -> Any:
    stops, lasts = Timer(timedelta(0)), Timer(timedelta(days=1), interval="epoch")
    steps = []
    for timer in (stops, lasts):
        trainer = run.trainer(timer, max_epochs=2)
        trainer.fit(Classifier(), row_loader(RAGGED), row_loader((5,)))
        steps.append(trainer.global_step)
    return steps, lasts.time_elapsed("train") > 0, lasts.time_remaining() > 0


def accumulation_that_changes(run: Run) -> Any:
    trainer = run.trainer(GradientAccumulationScheduler({0: 1, 1: 2, 3: 4}), max_epochs=5)
    trainer.fit(Classifier(), row_loader(RAGGED), row_loader((5,)))
    return trainer.global_step


class Tuned(Classifier):
    """Has a learning rate to find."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def learning_rate_finder(run: Run) -> Any:
    trainer, module = run.trainer(max_epochs=1), Tuned()
    found = Tuner(trainer).lr_find(module, row_loader(RAGGED * 8), row_loader((5,)), num_training=24, min_lr=1e-3)
    by_tuner = found.results, found.suggestion(), module.lr
    finder, module = LearningRateFinder(min_lr=1e-3, num_training_steps=20), Tuned()
    run.trainer(finder, max_steps=3).fit(module, row_loader(RAGGED * 8), row_loader((5,)))
    return by_tuner, finder.optimal_lr.results, module.lr


def simple_profiler(run: Run) -> Any:
    profiler = SimpleProfiler(run.folder, "times")
    run.trainer(profiler=profiler).fit(Classifier(), row_loader(), row_loader((5,)))
    wanted = ("run_training_epoch", "run_training_batch", "[LightningModule]Classifier.on_train_batch_end")
    reported = [path for path in run.folder.iterdir() if "run_training_batch" in path.read_text()]
    return [len(profiler.recorded_durations[name]) for name in wanted], len(reported) > 0


class Extras(Classifier):
    """Returns more than a loss; a hook keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"loss": torch.nn.functional.cross_entropy(logits, batch[1]), "logits": logits.detach(), "note": "a"}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.outputs.append(outputs)


def outputs_in_hooks(run: Run) -> Any:
    module = Extras()
    run.trainer(max_epochs=1).fit(module, row_loader(RAGGED), row_loader((5,)))
    return [o["loss"] for o in module.outputs if isinstance(o, dict)], OnRankZero(module.outputs)


class Watches(Callback):
    """Notes what it sees of a checkpoint, adds to it and finds it again."""

    def __init__(self) -> None:
        self.saved: Any = None
        self.loaded: Any = None
        self.state: Any = None

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = trainer.global_step
        self.saved = {name: value.double().sum() for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        whole = {name: value.double().sum() for name, value in checkpoint["state_dict"].items()}
        self.loaded = whole, checkpoint["added"], list(checkpoint["optimizer_states"][0]["state"])

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def what_checkpoint_hooks_see(run: Run) -> Any:
    first, second = Watches(), Watches()
    trainer = run.trainer(first, max_epochs=1)
    trainer.fit(Classifier(), row_loader(RAGGED), row_loader((5,)))
    trainer.save_checkpoint(run.folder / "one.ckpt")
    again = run.trainer(second, max_epochs=2)
    again.fit(Classifier(), row_loader(RAGGED), row_loader((5,)), ckpt_path=run.folder / "one.ckpt", **TRUSTED)
    return OnRankZero(first.saved), second.loaded, second.state, again.global_step


def hooks_of_callbacks(run: Run) -> Any:
    """Every rank goes through the same hooks in the same order."""
    seen: list[str] = []
    names = (
        "on_fit_start",
        "on_train_start",
        "on_train_batch_end",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "on_after_backward",
        "on_validation_end",
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
    )
    watching = LambdaCallback(**{name: lambda *args, name=name, **more: seen.append(name) for name in names})
    run.trainer(watching, max_epochs=2, accumulate_grad_batches=2).fit(
        Classifier(), row_loader(RAGGED), row_loader((5,))
    )
    return seen


suite = Suite(
    checkpoints_by_a_monitor, schedules_and_their_monitor, schedules_per_epoch, timers, accumulation_that_changes,
    learning_rate_finder, simple_profiler, outputs_in_hooks, what_checkpoint_hooks_see, hooks_of_callbacks,
)  # fmt: skip


@suite.for_each_strategy
def test_as_in_one_process(entry, scenario, tmp_path):
    suite.check(entry, scenario, tmp_path)
