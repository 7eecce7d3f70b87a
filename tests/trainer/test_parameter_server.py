"""Whole Trainer runs with parameter servers beside one process: steps, shares of rows, what is logged."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel.callbacks import CommunicationMonitor, MemoryMonitor, StalenessMonitor
from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import CLASSES, Classifier, row_dataset, row_loader, rows
from tests.trainer.pipelines import LOSS, WEIGHTS, assert_same_optimizer, make_trainer
from tests.trainer.servers import OPTIMIZERS, OWN_ROWS, RAGGED, Shares, assert_equal, ends, fit, slow, with_optimizer

pytestmark = pytest.mark.timeout(60)
ONE_WORKER = {
    "bsp": {}, "ssp": {"staleness": 2}, "essp": {"staleness": 1}, "bounded_delay": {"staleness": 0}, "async": {},
    "downpour": {"staleness": 0},
}  # fmt: skip


@pytest.mark.parametrize("consistency", ONE_WORKER)
def test_one_worker_is_plain_descent_bit_for_bit(consistency):
    plain, ours = fit("auto"), fit(ParameterServerStrategy(consistency, **ONE_WORKER[consistency]))
    assert_equal(ours[1], plain[1])
    assert ours[0].callback_metrics == plain[0].callback_metrics
    assert ends(ours[0])["step"] == ends(plain[0])["step"] == 8


@pytest.mark.parametrize("name", ["sgd", "adamw", *(slow(name) for name in ("adam", "adagrad"))])
def test_servers_make_the_steps_of_the_optimizer(name, tmp_path):
    """Bit for bit, with groups and a schedule; its state is in the checkpoint, as one process has it."""
    make = with_optimizer(OPTIMIZERS[name])
    save = {"callbacks": [ModelCheckpoint(tmp_path / "ours", "{epoch}")], "enable_checkpointing": True}
    plain = fit(
        "auto", make=make, callbacks=[ModelCheckpoint(tmp_path / "plain", "{epoch}")], enable_checkpointing=True
    )
    ours = fit(ParameterServerStrategy(num_servers=2), 1, make, **save)
    exact = {"rtol": 1e-6, "atol": 1e-7} if name == "adamw" else {}  # the second group's rate is 0.01 * (lr / 0.05)
    assert_equal(ours[1], plain[1], **exact)
    states = [torch.load(tmp_path / kind / "epoch=1.ckpt")["optimizer_states"][0] for kind in ("ours", "plain")]
    assert_same_optimizer(*states, exact or {"rtol": 0.0, "atol": 0.0})


class Synced(Classifier):
    """Logs over all workers, in steps too."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Dealt(Synced):
    """Worker r of n has rows r, r + n, r + 2n, ... of every batch of 12."""

    def train_dataloader(self):
        x, y = (whole[self.global_rank :: self.trainer.world_size] for whole in rows([48])[0])
        return DataLoader(TensorDataset(x, y), 12 // self.trainer.world_size)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("devices", [slow(1), 3, slow(4)])
def test_workers_on_shares_are_one_process_on_all_rows(devices):
    """Staleness 0: the mean over workers is the mean over the joined batch, as under DDP; so is what is logged."""
    runs = []
    for strategy, count in (("auto", 1), (ParameterServerStrategy(), devices)):
        torch.manual_seed(1)
        module, trainer = Dealt(), make_trainer(strategy, count, max_epochs=2, **OWN_ROWS)
        trainer.fit(module)
        runs.append((module, trainer.callback_metrics))
    (plain, wanted), (ours, found) = runs
    assert_equal(ours, plain, **WEIGHTS)
    for key in ("val_loss", "accuracy", "loss_epoch"):
        torch.testing.assert_close(found[key], wanted[key], **LOSS)


@pytest.mark.parametrize(
    "options", [{"consistency": "bsp"}, {"consistency": "ssp", "staleness": 1}, slow({"consistency": "async"})]
)
def test_uneven_loaders_train_on_all_their_rows(options):
    torch.manual_seed(1)
    trainer = make_trainer(ParameterServerStrategy(**options), 2, max_epochs=2, **OWN_ROWS)
    trainer.fit(Shares(), val_dataloaders=row_loader((5,)))
    assert trainer.callback_metrics["steps"] == 20


def test_bsp_steps_of_uneven_loaders_are_means_over_those_that_have_rows():
    trainer = make_trainer(ParameterServerStrategy(), 2, max_epochs=1, num_sanity_val_steps=0, **OWN_ROWS)
    torch.manual_seed(1)
    module = Shares()
    torch.manual_seed(1)
    reference = Classifier()
    trainer.fit(module, val_dataloaders=row_loader((5,)))
    optimizer = reference.configure_optimizers()
    batches = [list(row_loader((4,) * count, seed=rank)) for rank, count in enumerate((3, 7))]
    for step in range(7):
        there = [rows[step] for rows in batches if step < len(rows)]
        optimizer.zero_grad()
        (sum(reference.loss(batch) for batch in there) / len(there)).backward()
        optimizer.step()
    assert_equal(module, reference, **WEIGHTS)


class Whole(Classifier):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def test_validate_test_and_predict():
    module = Whole()
    plain, ours = make_trainer("auto", 1), make_trainer(ParameterServerStrategy(), 2, use_distributed_sampler=False)
    loader = row_loader(RAGGED)
    assert ours.validate(module, loader, verbose=False) == plain.validate(module, loader, verbose=False)
    assert ours.test(module, loader, verbose=False)[0] == pytest.approx(plain.test(module, loader, verbose=False)[0])
    keeps = Keeps()
    make_trainer(ParameterServerStrategy(), 2, [keeps], **OWN_ROWS).predict(module, loader)
    assert all(torch.equal(*pair) for pair in zip(keeps.seen, plain.predict(module, loader), strict=True))


class Keeps(Callback):
    def __init__(self):
        self.seen = []

    def on_predict_batch_end(self, trainer, module, outputs, *more):
        self.seen.append(outputs)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@pytest.mark.parametrize("options", [{"consistency": "ssp", "staleness": 1}, slow({"consistency": "bsp"})], ids=str)
def test_staleness_is_logged_beside_its_bounds(options, tmp_path):
    monitor = StalenessMonitor(picture=tmp_path / "staleness.png")
    trainer, _ = fit(ParameterServerStrategy(**options), 3, train=row_loader((4,) * 10), callbacks=[monitor])
    found = trainer.callback_metrics
    reading = monitor.reading
    assert sum(reading.all.ages.values()) == reading.all.reads == 3 * 20
    assert found["parallel/staleness_max"] <= found["parallel/staleness_max_bound"]
    assert found["parallel/staleness_gap_max"] <= found["parallel/staleness_gap_bound"]
    assert found["parallel/staleness_pushed_bytes"] == 60 * 4 * sum(p.numel() for p in Classifier().parameters())
    assert monitor.summary().startswith("staleness of 60 updates by 3 workers: mean ")
    assert (tmp_path / "staleness.png").exists()


def test_staleness_is_not_measured_where_nothing_is_stale():
    with pytest.raises(ValueError, match="measures versions of weights, and the Trainer uses SingleDeviceStrategy"):
        fit("auto", callbacks=[StalenessMonitor()])


class OwnMemory(Callback):
    def on_train_end(self, trainer, module):
        logged = [key for key in trainer.callback_metrics if key.startswith("parallel/memory_peak/")]
        assert logged == [f"parallel/memory_peak/rank_{trainer.global_rank}"]


def test_a_worker_logs_its_memory_under_its_own_rank():
    fit(ParameterServerStrategy("ssp"), 2, callbacks=[MemoryMonitor(every_n_steps=1), OwnMemory()], max_epochs=1)


def test_collectives_are_not_measured_where_there_are_none():
    with pytest.raises(ValueError, match=r"ParameterServerStrategy talk to servers\. Use StalenessMonitor, which"):
        fit(ParameterServerStrategy(), 2, callbacks=[CommunicationMonitor()])


@pytest.mark.parametrize("given", [{"distance": 0}, {"lipschitz": "x"}])
def test_what_a_bound_is_made_of_is_a_number_above_zero(given):
    with pytest.raises(ValueError, match=r"StalenessMonitor\((distance|lipschitz)=.*\) needs a number above 0"):
        StalenessMonitor(**given)


class Tuned(Classifier):
    """Has a learning rate to find, and tells which it trains with."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr

    def on_train_epoch_start(self) -> None:
        self.log("found", self.lr)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("num_training", [23, slow(24)])
def test_a_search_for_a_learning_rate_goes_through_dealt_rows_before_they_are_trained_on(num_training):
    """Six epochs of a search, the last cut short or not, and two once more; then as if the rate had been known."""
    options = {"train": row_dataset(32, 4), "use_distributed_sampler": True, "max_epochs": 2}
    finder = LearningRateFinder(min_lr=1e-3, num_training_steps=num_training, early_stop_threshold=None)
    trainer, searched = fit(ParameterServerStrategy(), 2, Tuned, callbacks=[finder], **options)
    found = float(trainer.callback_metrics["found"])
    assert trainer.global_step == 8
    assert_equal(searched, fit(ParameterServerStrategy(), 2, lambda: Tuned(found), **options)[1], **WEIGHTS)
