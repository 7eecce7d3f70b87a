"""Rows of predictions while workers die: what those that are left have is one process's, every row once."""

import os
import signal

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_parallel.errors import StageError
from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import Classifier, rows
from tests.trainer.pipelines import LOSS, make_trainer
from tests.trainer.servers import slow

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
WORKERS, BATCH = 3, 4


def data(sizes):
    return [TensorDataset(rows([size], seed=seed)[0][0]) for seed, size in enumerate(sizes)]


class Predicts(Classifier):
    """Workers are killed in given batches: (rank, loader, batch), or once they have met: (rank, None, batch)."""

    dies = ()

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        if (self.global_rank, dataloader_idx, batch_idx) in self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return self(batch[0])

    def on_predict_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        if (self.global_rank, None, batch_idx) in self.dies:
            os.kill(os.getpid(), signal.SIGKILL)


class Writes(BasePredictionWriter):
    """What a worker is told, batch by batch and in the end."""

    def __init__(self, folder):
        super().__init__("batch_and_epoch")
        self.folder, self.batches = folder, []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
        self.batches.append((dataloader_idx, batch_idx, indices))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        predictions = predictions if trainer.predict_loop.num_dataloaders > 1 else [predictions]
        torch.save((self.batches, predictions, indices), self.folder / f"{trainer.global_rank}.pt")


def predicted(folder, dies, sizes, workers=0, **options):
    """By loader, row and rank what was predicted; and each worker's batches of row numbers, by rank and loader."""
    torch.manual_seed(1)
    module = type("Killed", (Predicts,), {"dies": dies})()
    trainer = make_trainer(ParameterServerStrategy("bsp"), WORKERS, [Writes(folder)], **options)
    loaders = [DataLoader(one, BATCH, num_workers=workers) for one in data(sizes)]
    trainer.predict(module, loaders, return_predictions=False)
    found, batches = [{} for _ in sizes], {}
    for file in folder.glob("*.pt"):
        told, predictions, indices = torch.load(file)
        assert told == [(n, k, batch) for n, one in enumerate(indices) for k, batch in enumerate(one)]
        for values, of_loader, loader in zip(predictions, indices, found, strict=True):
            for value, batch in zip(values, of_loader, strict=True):
                for row, one in zip(batch, value, strict=True):
                    assert row not in loader
                    loader[row] = one
        batches[int(file.stem)] = indices
    return found, batches


def plain(sizes):
    torch.manual_seed(1)
    module = Predicts()
    return [dict(enumerate(module(one.tensors[0]).detach())) for one in data(sizes)]


def assert_predictions(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for row, value in theirs.items():
            torch.testing.assert_close(ours[row], value, **LOSS)


@pytest.mark.parametrize(("dies", "sizes", "workers"), [
    ([(1, 0, 2)], (59,), 0),
    ([(1, 0, 4), (2, 0, 5)], (60,), 0),  # its heir dies in turn, with what the first one left
    slow([(1, 0, 2)], (59,), 2),
    slow([], (59, 4), 0),
])  # fmt: skip
def test_what_a_killed_worker_had_is_predicted_by_the_others(dies, sizes, workers, tmp_path, caplog):
    found, batches = predicted(tmp_path, dies, sizes, workers)
    assert_predictions(found, plain(sizes))
    gone = {rank for rank, _, _ in dies}
    assert batches.keys() == set(range(WORKERS)) - gone
    for rank, (first, *_) in batches.items():  # its own share first, in order; the last row of it, if they are uneven
        own = list(range(rank, sizes[0], WORKERS))
        assert [row for batch in first for row in batch][: len(own)] == own
    for rank in gone:
        assert f"Worker {rank} is gone (SIGKILL" in caplog.text and "are dealt to them" in caplog.text


@pytest.mark.parametrize(("dies", "sizes"), [([(1, None, 1)], (24,)), slow([(1, 1, 0)], (24, 24))])
def test_what_a_worker_had_when_the_rows_of_a_loader_were_done_is_missing(dies, sizes, tmp_path, caplog):
    """The others predict nothing of a loader that they have done anew; the log tells."""
    found, _ = predicted(tmp_path, dies, sizes)
    wanted = plain(sizes)
    for row in range(1, 24, WORKERS):
        del wanted[0][row]
    assert_predictions(found, wanted)
    assert "What it had evaluated or predicted, and not yet given to the others or written, is missing." in caplog.text


def test_limited_batches_are_dealt_too(tmp_path):
    """Two batches each: the third worker dies in its second, and the others have one each of its two."""
    found, batches = predicted(tmp_path, [(2, 0, 1)], (60,), limit_predict_batches=2)
    assert found[0].keys() == set(range(24))
    assert {rank: len(of[0]) for rank, of in batches.items()} == {0: 3, 1: 3}


@pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled")
def test_rows_in_an_order_of_each_workers_own_end_the_run(tmp_path):
    """Nobody else knows which rows they are."""
    torch.manual_seed(1)
    module = type("Killed", (Predicts,), {"dies": [(1, 0, 2)]})()
    (rows_of,) = data((60,))
    loader = DataLoader(rows_of, BATCH, sampler=RandomSampler(rows_of))
    with pytest.raises(StageError, match="lost rank 1: its process ended"):
        make_trainer(ParameterServerStrategy("bsp"), WORKERS).predict(module, loader, return_predictions=False)
