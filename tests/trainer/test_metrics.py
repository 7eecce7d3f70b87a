"""torchmetrics objects: filled on the loss stage, and what they give is one process's on every rank."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.wrappers import MetricTracker, Running

from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import CLASSES, Classifier, row_loader
from tests.trainer.pipelines import (
    Case,
    assert_parity,
    failure_of,
    join_as_torchrun,
    make_trainer,
    many_on_stages,
    one_process,
)

RAGGED = (8, 8, 5, 3)
FEW_ROWS = "ignore:No (positive|negative) samples in targets"  # torchmetrics, of AUROC on a micro-batch of one row


class Measured(Classifier):
    """A classifier with metrics; subclasses say what they do with logits and classes of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.make()

    def make(self) -> None:
        self.acc, self.val_acc = MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES)

    def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        acc = self.acc if kind == "train" else self.val_acc
        acc(logits, y)
        both = {"on_step": True, "on_epoch": True} if kind == "train" else {}
        self.log(f"{kind}_acc", acc, prog_bar=True, **both)

    def step(self, kind: str, batch: Any) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.measure(kind, logits, batch[1], loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step("val", batch)


class Defaults(Measured):
    """`self.log(name, metric)` as it comes, and `update` in place of a forward."""

    def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        if kind == "train":
            self.acc(logits, y)
            self.log("acc", self.acc)
        else:
            self.val_acc.update(logits, y)
            self.log("val_acc", self.val_acc)


class Macro(Measured):
    """Values that are no means over rows: macro F1, and AUROC from everything seen."""

    def make(self) -> None:
        names = ("train_f1", "train_auroc", "val_f1", "val_auroc")
        kinds = (MulticlassF1Score, MulticlassAUROC)
        self.metrics = nn.ModuleDict({n: kinds["auroc" in n](CLASSES, average="macro") for n in names})

    def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        for name in ("f1", "auroc"):
            metric = self.metrics[f"{kind}_{name}"]
            metric(logits.softmax(-1), y)
            self.log(f"{kind}_{name}", metric, on_step=kind == "train", on_epoch=True)


class Collections(Measured):
    """Collections, whose members share their state; the training one by forward, the other by update."""

    def make(self) -> None:
        both = MetricCollection([MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES), MulticlassAccuracy(CLASSES)])
        self.train_metrics, self.val_metrics = both.clone(prefix="train_"), both.clone(prefix="val_")

    def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        if kind == "train":
            self.train_metrics(logits, y)
            self.log_dict(self.train_metrics, on_step=True, on_epoch=True)
        else:
            self.val_metrics.update(logits, y)
            self.log_dict(self.val_metrics)


class InHooks(Measured):
    """Metrics filled in steps, computed, logged and reset by hand in hooks; one is filled in a hook."""

    def make(self) -> None:
        self.train_loss, self.val_loss, self.best = MeanMetric(), MeanMetric(), MaxMetric()
        self.acc, self.group = MulticlassAccuracy(CLASSES), MetricCollection({"f1": MulticlassF1Score(CLASSES)})
        self.weighted, self.rows, self.by_batch = MeanMetric(), SumMetric(), MeanMetric()

    def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        if kind == "train":
            self.train_loss(loss)
            self.log("train_loss", self.train_loss, on_step=True, on_epoch=True)
            self.weighted(loss, weight=len(y))
            self.log("weighted", self.weighted, on_step=True, on_epoch=True)
            self.rows.update(len(y))
        else:
            self.val_loss.update(loss)
            self.acc.update(logits, y)
            self.group.update(logits, y)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.by_batch.update(outputs["loss"])
        self.log("by_batch", self.by_batch.compute())

    def on_train_epoch_end(self) -> None:
        self.log("rows", self.rows.compute())
        self.rows.reset()

    def on_validation_epoch_end(self) -> None:
        acc = self.acc.compute()
        self.best(acc)
        self.log("val_acc", acc)
        self.log("best", self.best.compute())
        self.log("val_loss", self.val_loss)
        self.log_dict({f"val_{name}": value for name, value in self.group.compute().items()})
        self.acc.reset()
        self.group.reset()


@pytest.mark.filterwarnings(FEW_ROWS)
@pytest.mark.parametrize("make_module", [Measured, Defaults, Macro, Collections, InHooks])
def test_metric_objects_are_those_of_one_process(make_module: Callable[[], LightningModule]):
    case = Case(make_module, lambda: row_loader(RAGGED), trainer={"max_epochs": 3})
    stages = (2, 4) if make_module in (Measured, Collections) else (2,)
    for record in assert_parity(case, stages=stages):
        assert record.final


def test_few_rows_and_uneven_weights():
    """A batch of one micro-batch, and micro-batches that are weighted by something else than rows."""

    class ByLabels(InHooks):
        def step(self, kind: str, batch: Any) -> Tensor:
            logits, y = self(batch[0]), batch[1].masked_fill(batch[1] == 1, -100)
            loss = F.cross_entropy(logits, y, ignore_index=-100)
            self.train_loss(loss) if kind == "train" else self.val_loss(loss)
            self.acc.update(logits, batch[1])
            self.group.update(logits, batch[1])
            self.log(f"{kind}_mean", self.train_loss if kind == "train" else self.val_loss, on_epoch=True)
            return loss

        def on_train_epoch_end(self) -> None:
            pass

    weight = lambda batch: (batch[1] != 1).sum()  # noqa: E731
    labels = [(x, torch.tensor([0, 2]).repeat(len(y))[: len(y)]) for x, y in row_loader((8, 6)).dataset]
    labels[0][1][[0, 3, 4]] = 1  # every micro-batch keeps a label
    loader = lambda: torch.utils.data.DataLoader(labels, batch_size=None)  # noqa: E731
    assert_parity(Case(ByLabels, loader, {"loss_weight": weight}, {"max_epochs": 2}), stages=(2,))
    assert_parity(Case(Measured, lambda: row_loader((1, 2, 1)), trainer={"max_epochs": 2}), stages=(2,))
    assert_parity(Case(Measured, lambda: row_loader(RAGGED), {"num_microbatches": 1}), stages=(2,))


def test_monitors_act_alike_on_every_rank(tmp_path):
    class Worse(Measured):
        """Its metric falls by construction, so that training stops early."""

        def make(self) -> None:
            super().make()
            self.falling = MeanMetric()

        def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
            super().measure(kind, logits, y, loss)
            if kind == "val":
                self.falling.update(-float(self.current_epoch))
                self.log("falling", self.falling)

    def callbacks() -> list[Callback]:
        best = ModelCheckpoint(tmp_path / str(torch.initial_seed()), monitor="val_acc", mode="max", save_top_k=2)
        return [EarlyStopping("falling", mode="max", patience=2), best]

    def outcome(trainer: Trainer, module: LightningModule) -> Any:
        saver = trainer.checkpoint_callback
        best = sorted(float(score) for score in saver.best_k_models.values())
        return (
            trainer.current_epoch,
            best,
            float(saver.best_model_score),
            float(trainer.early_stopping_callback.best_score),
        )

    options = {"max_epochs": 9, "enable_checkpointing": True, "callbacks": callbacks}
    case = Case(Worse, lambda: row_loader(RAGGED), trainer=options, after=outcome)
    reference, [records] = one_process(case), many_on_stages([case.but(seed=2, initial=None)], 2)
    assert [record.extra[0] for record in records] == [3, 3] == [reference.extra[0]] * 2
    assert records[0].extra == records[1].extra


def test_the_loss_check_leaves_metrics_as_they_were():
    """The check runs the step again; what metrics have seen, count and remember is untouched by it."""

    def seen(trainer: Trainer, module: Any) -> Any:
        metrics = [module.acc, module.auroc, *module.group.values(copy_state=False)]
        states = [state for metric in metrics for state in metric.metric_state.values()]
        return [m._update_count for m in metrics], [m._computed for m in metrics], states, module.group.compute_groups

    class Several(Measured):
        def make(self) -> None:
            self.acc, self.auroc = MulticlassAccuracy(CLASSES), MulticlassAUROC(CLASSES)
            self.group = MetricCollection([MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES)])

        def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
            self.acc(logits, y)
            self.auroc.update(logits.softmax(-1), y)
            self.group.update(logits, y)

    case = Case(Several, lambda: row_loader((5,)), trainer={"max_steps": 1}, validate=False, at_end=seen)
    [[checked], [unchecked]] = [
        records[:1] for records in many_on_stages([case, case.but({"check_loss": False})], 2)
    ]  # fmt: skip
    counts, computed, states, groups = checked.extra
    assert counts == [4, 4, 4, 4] and computed == [None] * 4 and len(groups) == 1
    assert (counts, computed, groups) == (*unchecked.extra[:2], unchecked.extra[3])
    torch.testing.assert_close(states, unchecked.extra[2], rtol=0, atol=0)


class ReadsOnRankZero(Measured):
    """Rank 0 reads a metric for itself, again and again, and everybody reads it later."""

    def make(self) -> None:
        self.acc, self.total = MulticlassAccuracy(CLASSES), SumMetric()
        self.read: list[Tensor] = []

    def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        self.acc(logits, y)
        self.total.update(len(y))
        self.log("acc", self.acc, on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.trainer.is_global_zero:
            for _ in range(3):
                self.acc.compute()
                self.total.compute()
        if index % 2:
            self.read.append(self.total.compute())
        self.total.update(100)
        self.read += [self.total.compute(), self.acc.compute()]

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.total.compute()
        self.total.reset()
        self.total.update(7)
        self.read.append(self.total.compute())

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.total.compute()


def test_what_rank_0_reads_alone_confuses_nobody():
    case = Case(
        ReadsOnRankZero, lambda: row_loader(RAGGED), trainer={"max_epochs": 2}, validate=False,
        after=lambda trainer, module: module.read,
    )  # fmt: skip
    reference, [first, again] = one_process(case), many_on_stages([case, case], 2)
    for records in (first, again):
        for record in records:
            torch.testing.assert_close(torch.stack(record.extra), torch.stack(reference.extra), rtol=1e-6, atol=0)
        assert all(torch.equal(*pair) for pair in zip(records[0].extra, records[1].extra, strict=True))


def test_a_progress_bar_on_rank_0_reads_first(capfd):
    class ResetsByHand(Measured):
        def on_train_epoch_end(self) -> None:
            self.seen = self.acc.compute()
            self.acc.reset()

    options = {"max_epochs": 2, "enable_progress_bar": True}
    case = Case(ResetsByHand, lambda: row_loader(RAGGED), trainer=options, after=lambda t, m: m.seen)
    [record] = assert_parity(case, stages=(2,))
    assert record.extra == record.final["callback/train_acc_epoch"]


def test_afterwards_metrics_are_ordinary():
    def run(rank: int, port: int) -> Any:
        join_as_torchrun(rank, 2, port)
        module, copies = Measured(), []

        class Copies(Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                copies.extend([copy.deepcopy(module.acc), pickle.loads(pickle.dumps(module.acc))])

        before = dict(vars(module.acc))
        trainer = make_trainer(PipelineStrategy(num_microbatches=2), 2, [Copies()])
        trainer.fit(module, row_loader(RAGGED), row_loader((3,)))
        for metric in (module.acc, *copies):
            metric.reset()
            metric.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
            assert type(metric) is MulticlassAccuracy and float(metric.compute()) == pytest.approx(
                1 / 3 + 0 * rank, abs=0.2
            )
            assert vars(metric).keys() == before.keys()
        assert module.acc.distributed_available_fn is before["distributed_available_fn"]
        [result] = trainer.validate(module, row_loader((5,)), verbose=False)
        return result["val_acc"]

    results = run_ranks(run, 2, free_port(), group=False)
    assert results[0] == results[1]


# -- what is refused ---------------------------------------------------------------------------------------------------


def measured(make: Callable[[Any], None], measure: Callable[..., None] = lambda *args: None) -> Callable[[], Measured]:
    """A module with metrics of its own, in one line."""
    return lambda: type("Module", (Measured,), {"make": make, "measure": measure})()


class Inside(nn.Module):
    """A block with a metric in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(6, 6), MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def with_a_block_that_measures() -> Classifier:
    return Classifier(nn.Sequential(Inside(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)))


def set_mean(self: Any) -> None:
    self.mean = MeanMetric()


def logs_a_stranger(self: Any, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
    stranger = MeanMetric()
    stranger(loss.detach())
    self.log("stranger", stranger)


def logs_a_collection(self: Any, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
    self.log("all", self.all)


def logs_many_numbers(self: Any, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
    self.each(logits, y)
    self.log("each", self.each)


def logs_its_own_forward(self: Any, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
    self.own(loss)
    self.log("own", self.own)


class OwnForward(MeanMetric):
    def forward(self, value: Tensor) -> Tensor:
        self.update(value)
        self._forward_cache = value
        return value


class UpdatesEarly(Measured):
    def make(self) -> None:
        self.mean = MeanMetric()

    def step(self, kind: str, batch: Any) -> Tensor:
        hidden = self.net[0](batch[0])
        self.mean.update(hidden.mean())
        return F.cross_entropy(self.net[1:](hidden), batch[1])


class LogsInAHook(Measured):
    def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        self.acc(logits, y)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.log("acc", self.acc, on_step=True, on_epoch=True)


class ReadsOnRankOne(Measured):
    def on_train_end(self) -> None:
        if not self.trainer.is_global_zero:
            self.acc.compute()


class ComputesInside(Measured):
    def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        self.acc.update(logits, y)
        self.log("acc", self.acc.compute())


def each_class(self: Any) -> None:
    self.each = MulticlassAccuracy(CLASSES, average=None)


REFUSED = [
    (measured(lambda self: setattr(self, "run", Running(MeanMetric(), 3))), "`run` is a Running, which counts updates"),
    (
        measured(lambda self: setattr(self, "track", MetricTracker(MulticlassAccuracy(CLASSES)))),
        "`track` is a MetricTracker, which makes new metrics as the run goes: a pipeline, which runs a step once a",
    ),
    (
        with_a_block_that_measures,
        "Metric `net.0.mean` lies on stage 0, in module `net.0`, but metrics are filled where",
    ),
    (
        measured(set_mean, logs_a_stranger),
        "self.log('stranger') got a MeanMetric that is no metric of the module. Make",
    ),
    (
        measured(lambda self: setattr(self, "all", MetricCollection([MeanMetric()])), logs_a_collection),
        "self.log('all') got a MetricCollection that is no metric of the module. Use self.log_dict(collection).",
    ),
    (measured(each_class, logs_many_numbers), "Metric `each` is logged, but it gives tensor(["),
    (
        measured(lambda self: setattr(self, "own", OwnForward()), logs_its_own_forward),
        "Metric `own` is logged on_step, but OwnForward has a forward of its own, from which a pipeline cannot",
    ),
    (UpdatesEarly, "Metric `mean` is updated with a value computed from the output of `net.0` (stage 0), which the"),
    (
        LogsInAHook,
        "logged as 'acc' must be a tensor. Found the value of one micro-batch. A pipeline knows a whole batch's",
    ),
    (ReadsOnRankOne, "Rank 1 computes metric `acc`, which rank 0 did not compute. Only rank 0 (the last stage) holds"),
    (ComputesInside, "Metric `acc` is computed inside the step, where it has seen the micro-batches so far. Log the"),
]


@pytest.mark.parametrize(("make_module", "text"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_exact_is_refused_in_words(make_module: Callable[[], LightningModule], text: str):
    case = Case(make_module, lambda: row_loader((8, 8)), {"num_microbatches": 2}, {"max_epochs": 1}, validate=False)
    assert text in failure_of(case)
