"""What is logged, in every way and in every hook that allows it, is what one process logs, on every rank.

What a step logs in all its forms is in ``test_parity.py`` (``Talkative``), torchmetrics objects are in
``test_metrics.py``; here is what lies around steps.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.trainer.conformance.runs import Run, Suite, core
from tests.trainer.modules import CLASSES, Classifier, row_loader
from tests.trainer.pipelines import Case, failure_of

RAGGED = (8, 5, 8, 3)
STEPS = ("training_step", "validation_step", "test_step", "backward")
HOOKS = [name for name, options in _FxValidator.functions.items() if options is not None and name not in STEPS]


class WithATest(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"test_loss": self.loss(batch), "test_number": 2.0})


def logging_in(hook: str) -> Any:
    """The hook, with a line that logs before it does what it does."""

    def log_and_go_on(self: LightningModule, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.log(f"in_{hook}", float(self.calls % 7))
        parent = getattr(super(logs_everywhere, self), hook, None)
        return None if parent is None else parent(*args, **kwargs)

    return log_and_go_on


logs_everywhere = type("LogsEverywhere", (WithATest,), {"calls": 0})
for _hook in HOOKS:
    setattr(logs_everywhere, _hook, logging_in(_hook))


@core
def in_every_hook(run: Run) -> Any:
    trainer, module = run.trainer(max_epochs=2, gradient_clip_val=0.5), logs_everywhere()
    trainer.fit(module, row_loader(RAGGED), row_loader((5, 8)))
    seen = {key for key in trainer.callback_metrics if key.startswith("in_")}
    tested = trainer.test(module, row_loader((5, 8)), verbose=False)
    return sorted(seen), tested, module.calls


class OutsideSteps(Classifier):
    """Logs with every option from hooks around steps."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("step_loss", outputs["loss"], on_step=True, on_epoch=True, prog_bar=True, batch_size=len(batch[0]))
        self.log_dict({"rows": len(batch[0]), "index": float(batch_idx)}, on_epoch=True, reduce_fx="max")

    def on_after_backward(self) -> None:
        self.log("learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"], sync_dist=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        copies = (self.trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        self.log("val_rows", len(batch[0]) / copies, reduce_fx="sum", sync_dist=True)  # which all see the same rows

    def on_validation_epoch_end(self) -> None:
        self.log("doubled", 2 * self.trainer.callback_metrics.get("step_loss_epoch", torch.zeros(())))


@core
def outside_steps(run: Run) -> Any:
    trainer = run.trainer(max_epochs=3, log_every_n_steps=3)
    trainer.fit(OutsideSteps(), row_loader(RAGGED), row_loader((5, 8)))


class Returns(Classifier):
    """Returns a dict from its steps; hooks and callbacks get it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("returned", outputs["loss"])


def of_what_steps_return(run: Run) -> Any:
    run.trainer(max_epochs=2).fit(Returns(), row_loader(RAGGED), row_loader((5, 8)))


class ComputedAtTheEnd(Classifier):
    """Metric objects that steps update and epoch-end hooks compute; what the lists of old became."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.acc, self.best = MeanMetric(), MulticlassAccuracy(CLASSES), MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.update(loss.detach(), weight=len(batch[0]))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", self.mean.compute(), prog_bar=True)
        self.mean.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.acc.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        value = self.acc.compute()
        self.best.update(value)
        self.log_dict({"acc": value, "best": self.best.compute()})
        self.acc.reset()


def metrics_computed_in_epoch_end_hooks(run: Run) -> Any:
    run.trainer(max_epochs=3).fit(ComputedAtTheEnd(), row_loader(RAGGED), row_loader((5, 8)))


class Gathers(Classifier):
    """`all_gather` and `sync_dist` where there is one copy of the model."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("gathered", self.all_gather(outputs["loss"]).mean(), sync_dist=True)


def gathered_values(run: Run) -> Any:
    run.trainer().fit(Gathers(), row_loader(), row_loader((5,)))


suite = Suite(
    in_every_hook, outside_steps, of_what_steps_return, metrics_computed_in_epoch_end_hooks, gathered_values
)  # fmt: skip


@suite.for_each_strategy
def test_as_in_one_process(entry, scenario, tmp_path):
    suite.check(entry, scenario, tmp_path)


class Appends(Classifier):
    """Fills a list in steps of one kind and reduces it at the end of the epoch."""

    def __init__(self, kind: str, careful: bool) -> None:
        super().__init__()
        self.kind, self.careful, self.seen = kind, careful, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.append("train", loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.append("val", self.loss(batch))

    def on_train_epoch_end(self) -> None:
        self.reduce("train")

    def on_validation_epoch_end(self) -> None:
        self.reduce("val")

    def append(self, kind: str, value: Tensor) -> None:
        if kind == self.kind:
            self.seen.append(value)

    def reduce(self, kind: str) -> None:
        if kind == self.kind:
            self.log("mean", sum(self.seen) / max(1, len(self.seen)) if self.careful else torch.stack(self.seen).mean())
            self.seen.clear()


CUT_SHORT = (
    ", on a rank where steps do not run to their end (what a step appends or sets is there on rank 0 only: log it in"
    " the step, or use a torchmetrics object)\n"
)


@pytest.mark.parametrize("kind", ["train", "val"])
def test_a_list_that_steps_fill_is_explained(kind: str):
    """Steps run to their end on rank 0 only, so the list is empty elsewhere."""
    case = Case(lambda: Appends(kind, careful=False), row_loader, trainer={"max_epochs": 1})
    text = failure_of(case, whole=True)
    hook = {"train": "on_train_epoch_end (epoch 0)", "val": "on_validation_epoch_end"}[kind]
    assert text.startswith("stack expects a non-empty TensorList")
    assert f"stage 0 (rank 1) failed in {hook}{CUT_SHORT}" in text


@pytest.mark.parametrize("kind", ["train", "val"])
def test_a_list_that_steps_fill_is_refused_even_in_the_last_epoch(kind: str):
    """Nothing fails on the empty list, but the ranks logged different values."""
    case = Case(lambda: Appends(kind, careful=True), row_loader, trainer={"max_epochs": 1, "num_sanity_val_steps": 0})
    assert "The ranks logged different values of 'mean' (rank 1 unlike rank 0)" in failure_of(case)
