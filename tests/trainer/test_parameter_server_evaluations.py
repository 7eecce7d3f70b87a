"""Rows of evaluations while workers die: what is logged is one process's on all rows, each counted once."""

import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import CLASSES, Classifier, rows
from tests.trainer.pipelines import LOSS, make_trainer
from tests.trainer.servers import slow

pytestmark = pytest.mark.timeout(60)
WORKERS, ROWS, BATCH = 3, 60, 4


class Evaluates(Classifier):
    """Workers are killed in given batches of given evaluations: (rank, evaluation, loader, batch)."""

    dies = ()

    def __init__(self, sizes=(ROWS,)):
        super().__init__()
        self.sizes, self.evaluation = sizes, 0
        self.accuracy, self.number = MulticlassAccuracy(CLASSES, average="micro"), SumMetric()

    def val_dataloader(self):
        data = [TensorDataset(*rows([size], seed=seed)[0]) for seed, size in enumerate(self.sizes)]
        return [DataLoader(one, BATCH) for one in data]

    test_dataloader = val_dataloader

    def on_validation_start(self):
        self.evaluation += not self.trainer.sanity_checking

    on_test_start = on_validation_start

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if (self.global_rank, self.evaluation, dataloader_idx, batch_idx) in self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("rows", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
        self.accuracy.update(self(batch[0]), batch[1])
        self.number.update(len(batch[0]))

    test_step = validation_step

    def on_validation_epoch_end(self):
        self.log_dict({"accuracy": self.accuracy.compute(), "number": self.number.compute()})
        self.accuracy.reset()
        self.number.reset()

    on_test_epoch_end = on_validation_epoch_end


def evaluated(dies, kind="validate", devices=WORKERS, sizes=(ROWS,), **options):
    torch.manual_seed(1)
    module = type("Killed", (Evaluates,), {"dies": dies})(sizes)
    if sizes[1:]:
        module.on_validation_epoch_end = lambda: None  # a metric object computed at the end of all loaders
    trainer = make_trainer(ParameterServerStrategy("bsp"), devices, **options)
    return getattr(trainer, kind)(module, verbose=False)


def plain(kind="validate", sizes=(ROWS,)):
    torch.manual_seed(1)
    module = Evaluates(sizes)
    if sizes[1:]:
        module.on_validation_epoch_end = lambda: None
    return getattr(make_trainer("auto", 1), kind)(module, verbose=False)


def assert_metrics(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=LOSS["rtol"]), key


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
@pytest.mark.parametrize(("dies", "kind"), [
    ([(1, 1, 0, 2)], "validate"), slow([(2, 1, 0, 0)], "test"), ([(1, 1, 0, 4), (2, 1, 0, 5)], "validate"),
])  # fmt: skip
def test_what_a_killed_worker_had_is_evaluated_by_the_others(dies, kind):
    """Also by one whose heir dies in turn, while it evaluates what the first one left."""
    assert_metrics(evaluated(dies, kind), plain(kind))


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
def test_each_of_several_loaders_is_evaluated_whole():
    """One worker dies in the first, another in the second."""
    sizes = (ROWS, 24)
    assert_metrics(evaluated([(1, 1, 0, 2), (2, 1, 1, 0)], sizes=sizes), plain(sizes=sizes))


class Stream(IterableDataset):
    """Rows that come one by one; how many, nobody knows before."""

    def __iter__(self):
        return zip(*rows([ROWS])[0], strict=True)


class Streamed(Evaluates):
    def val_dataloader(self):
        return DataLoader(Stream(), BATCH)


def test_a_loader_without_a_length_is_evaluated_to_its_end():
    torch.manual_seed(1)
    module = Streamed()
    assert_metrics(make_trainer(ParameterServerStrategy("bsp"), 1).validate(module, verbose=False), plain())


class Trained(Evaluates):
    """A worker dies in the first epoch's evaluation, and one in the second epoch's training."""

    killed = ()

    def train_dataloader(self):
        return DataLoader(TensorDataset(*rows([ROWS])[0]), BATCH)

    def training_step(self, batch, batch_idx):
        if (self.global_rank, self.current_epoch, batch_idx) in self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        # The same weights on every worker: what one finds on all rows by itself.
        x, y = rows([ROWS])[0]
        with torch.no_grad():
            self.log("wanted_loss", self.loss((x, y)))
            self.log("wanted_accuracy", (self(x).argmax(1) == y).float().mean())


@pytest.mark.parametrize("epochs", [1, 2])
def test_evaluations_of_a_fit_are_of_all_rows(epochs, caplog):
    """The one in which a worker dies, and the next one, whose rows are divided among those who are left."""
    torch.manual_seed(1)
    module = type("Killed", (Trained,), {"dies": [(1, 1, 0, 3)], "killed": [(2, 1, 1)]})()
    trainer = make_trainer(ParameterServerStrategy("bsp"), 3, max_epochs=epochs)
    trainer.fit(module)
    found = trainer.callback_metrics
    assert found["rows"] == found["number"] == ROWS
    torch.testing.assert_close(found["val_loss"], found["wanted_loss"], **LOSS)
    torch.testing.assert_close(found["accuracy"], found["wanted_accuracy"], **LOSS)
    assert "What it had evaluated" not in caplog.text  # both died where nothing was lost


class DiesLate(Evaluates):
    """A worker dies between the end of all rows and its metrics."""

    def on_validation_epoch_end(self):
        if self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().on_validation_epoch_end()


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
def test_a_worker_that_dies_while_metrics_are_computed_is_missing_in_them_and_the_log_says_so(caplog):
    trainer = make_trainer(ParameterServerStrategy("bsp"), WORKERS)
    (found,) = trainer.validate(DiesLate(), verbose=False)
    assert found["number"] == ROWS * (WORKERS - 1) // WORKERS
    assert "What it had evaluated or predicted, and not yet given to the others or written, is missing." in caplog.text
