"""Whole Trainer runs with parameter servers: parity, uneven shares, checkpoints, failures."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel.callbacks import StalenessMonitor
from lightning_parallel.errors import StageError
from lightning_parallel.server import Adagrad
from lightning_parallel.server.filters import Float16, TopK
from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import CLASSES, Classifier, chain, row_dataset, row_loader, rows
from tests.trainer.pipelines import LOSS, WEIGHTS, assert_same_optimizer, make_trainer

pytestmark = pytest.mark.timeout(60)
RAGGED = (8, 5, 8, 3)
OWN_ROWS = {"use_distributed_sampler": False}
ONE_WORKER = {
    "bsp": {}, "ssp": {"staleness": 2}, "essp": {"staleness": 1}, "bounded_delay": {"staleness": 0}, "async": {},
    "downpour": {"staleness": 0},
}  # fmt: skip


class Ends(Callback):
    """What rank 0 saw, brought to the process that started it."""

    def __init__(self):
        self.state = {"losses": []}

    def on_validation_epoch_end(self, trainer, module):
        self.state["losses"].append(float(trainer.callback_metrics["val_loss"]))

    def on_train_end(self, trainer, module):
        self.state |= {"step": trainer.global_step, "epoch": trainer.current_epoch}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def fit(strategy, devices=1, make=Classifier, train=None, validate=None, callbacks=(), checkpoint=None, **options):
    """A run in this process, or started from it; rows are the same for all workers unless told otherwise."""
    torch.manual_seed(1)
    module = make()
    options = {"max_epochs": 2, "use_distributed_sampler": False, **options}
    trainer = make_trainer(strategy, devices, [Ends(), *callbacks], **options)
    trainer.fit(module, train or row_loader(RAGGED), validate or row_loader((5, 8)), ckpt_path=checkpoint)
    return trainer, module


def ends(trainer):
    return next(callback.state for callback in trainer.callbacks if isinstance(callback, Ends))


def assert_equal(ours, theirs, **tolerance):
    tolerance = tolerance or {"rtol": 0.0, "atol": 0.0}
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(
            ours.state_dict()[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def with_optimizer(make_optimizer):
    class Optimized(Classifier):
        def configure_optimizers(self):
            return make_optimizer(self)

    return Optimized


def scheduled(module):
    groups = [{"params": module.net[:4].parameters(), "lr": 0.05}, {"params": module.net[4:].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


OPTIMIZERS = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda module: torch.optim.Adam(module.parameters(), 0.01),
    "adagrad": lambda module: torch.optim.Adagrad(module.parameters(), 0.1),
    "adamw": scheduled,
}


@pytest.mark.parametrize("consistency", ONE_WORKER)
def test_one_worker_is_plain_descent_bit_for_bit(consistency):
    plain, ours = fit("auto"), fit(ParameterServerStrategy(consistency, **ONE_WORKER[consistency]))
    assert_equal(ours[1], plain[1])
    assert ours[0].callback_metrics == plain[0].callback_metrics
    assert ends(ours[0])["step"] == ends(plain[0])["step"] == 8


@pytest.mark.parametrize("name", OPTIMIZERS)
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


@pytest.mark.parametrize("devices", [1, 3, 4])
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


class Shares(Classifier):
    """Every worker has a loader of its own, of another length."""

    def __init__(self, lengths=(3, 7)):
        super().__init__()
        self.lengths = lengths

    def train_dataloader(self):
        return row_loader((4,) * self.lengths[self.global_rank], seed=self.global_rank)

    def on_train_epoch_end(self):
        counts = self.all_gather(torch.tensor(self.trainer.global_step))
        self.log("steps", counts.sum().float())


@pytest.mark.parametrize(
    "options", [{"consistency": "bsp"}, {"consistency": "ssp", "staleness": 1}, {"consistency": "async"}]
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


# -- checkpoints -------------------------------------------------------------------------------------------------------


OTHER_CALLBACKS = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


def saving(folder):
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    return {"callbacks": [checkpoint], "enable_checkpointing": True}


@OTHER_CALLBACKS
@pytest.mark.parametrize(
    "resume", [("auto", 1, {}), ("ps", 3, {"num_servers": 2}), ("ps", 1, {"consistency": "ssp"})], ids=str
)
def test_a_checkpoint_resumes_anywhere(tmp_path, resume):
    """In a plain Trainer, and with another number of workers and servers; the optimizer's state goes on."""
    kind, devices, options = resume
    through = fit("auto", max_epochs=4)[1]
    fit(ParameterServerStrategy(num_servers=1), 2, **saving(tmp_path))
    strategy = "auto" if kind == "auto" else ParameterServerStrategy(**options)
    trainer, module = fit(strategy, devices, max_epochs=4, checkpoint=tmp_path / "epoch=1.ckpt")
    assert ends(trainer)["step"] == 16
    assert_equal(module, through, **WEIGHTS)


@OTHER_CALLBACKS
def test_a_plain_checkpoint_resumes_on_servers(tmp_path):
    make = with_optimizer(OPTIMIZERS["adam"])
    through = fit("auto", make=make, max_epochs=4)[1]
    fit("auto", make=make, **saving(tmp_path))
    module = fit(
        ParameterServerStrategy(num_servers=3, replication=2),
        2,
        make,
        max_epochs=4,
        checkpoint=tmp_path / "epoch=1.ckpt",
    )[1]
    assert_equal(module, through, **WEIGHTS)


def test_a_stale_run_saves_one_version(tmp_path):
    """What is saved is what every worker validated with."""
    module = fit(
        ParameterServerStrategy("ssp", 3, num_servers=2),
        3,
        **saving(tmp_path),
        train=row_dataset(60, 4),
        use_distributed_sampler=True,
    )[1]
    saved = torch.load(tmp_path / "epoch=1.ckpt")["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())


def test_early_stopping_stops_all_after_the_same_epoch():
    trainer = make_trainer(
        ParameterServerStrategy("async"),
        2,
        [Ends(), EarlyStopping("val_loss", min_delta=9.0, patience=1)],
        max_epochs=9,
        **OWN_ROWS,
    )
    trainer.fit(Shares(), val_dataloaders=row_loader((5,)))
    assert ends(trainer)["step"] == 6 and ends(trainer)["epoch"] == 2
    assert trainer.callback_metrics["steps"] == 20


def test_running_statistics_are_means_over_workers():
    make = lambda: Classifier(chain(3, lambda: nn.BatchNorm1d(6)))  # noqa: E731
    module = fit(
        ParameterServerStrategy("ssp"), 2, make, train=row_dataset(32, 8), use_distributed_sampler=True, max_epochs=1
    )[1]
    alone = [nn.BatchNorm1d(6) for _ in range(2)]
    first = module.net[1]
    assert first.num_batches_tracked == 2 and not torch.equal(first.running_mean, alone[0].running_mean)
    assert first.running_mean.isfinite().all()


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


# -- what else an optimizer may be -------------------------------------------------------------------------------------


def test_an_unknown_optimizer_is_refused_and_workers_can_run_it():
    make = with_optimizer(lambda module: torch.optim.RMSprop(module.parameters(), 0.01))
    with pytest.raises(
        StageError, match=r"The servers know SGD, Adagrad, Adam, AdamW, and this is RMSprop\. Let each worker run it"
    ):
        fit(ParameterServerStrategy(), 2, make)
    assert_equal(fit(ParameterServerStrategy(update="worker"), 2, make)[1], fit("auto", make=make)[1], **WEIGHTS)


def test_what_a_scheduler_may_not_change_is_said():
    def cycling(module):
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    with pytest.raises(
        StageError, match=r"told of learning rates alone. Schedule lr only \(OneCycleLR\(cycle_momentum=False\)\)"
    ):
        fit(ParameterServerStrategy(), 2, with_optimizer(cycling))


def test_layers_that_are_frozen_in_the_run_are_refused_where_servers_step():
    class Freezes(Classifier):
        def on_train_epoch_start(self):
            self.net[12].requires_grad_(self.current_epoch == 0)

    with pytest.raises(StageError, match="has 14 parameters that train of 16, and at first had 16 of 16"):
        fit(ParameterServerStrategy(), 2, Freezes)
    assert_equal(fit(ParameterServerStrategy(update="worker"), 2, Freezes)[1], fit("auto", make=Freezes)[1], **WEIGHTS)


def test_64_bits_are_refused():
    with pytest.raises(StageError, match=r"got a parameter of torch.float64, but the servers hold float32"):
        fit(ParameterServerStrategy(), 1, precision="64-true")


def test_downpour_with_an_update_of_its_own_and_filters_learns():
    strategy = ParameterServerStrategy(
        "downpour", update=Adagrad(0.02), n_push=2, n_fetch=3, filters=[TopK(0.5), Float16()]
    )
    shares = {"train": row_loader((8,) * 10), "validate": row_loader((8,) * 10), "max_epochs": 6}
    losses = ends(fit(strategy, 2, **shares)[0])["losses"]
    assert losses[-1] < losses[1] - 0.02  # losses[0] is the sanity check's


# -- failures ----------------------------------------------------------------------------------------------------------


class Dies(Shares):
    """One of its workers is killed in its third step."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("consistency", ["bsp", "ssp"])
def test_the_rest_go_on_when_a_worker_is_killed(consistency, caplog):
    """Its rows are skipped; nobody waits for its lease."""
    trainer = make_trainer(ParameterServerStrategy(consistency, lease=40.0), 3, max_epochs=2, **OWN_ROWS)
    began = time.monotonic()
    trainer.fit(Dies((5, 5, 6)), val_dataloaders=row_loader((5,)))
    assert trainer.callback_metrics["steps"] == 22
    assert time.monotonic() - began < 30
    assert "Worker 1 is gone (SIGKILL" in caplog.text


class Stops(Shares):
    """One of its workers is stopped in its third step, until the other has made all of its own without it."""

    stopped = multiprocessing.get_context("fork").Value("i", 0)
    alone = multiprocessing.get_context("fork").Event()

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.trainer.global_step == 2:
            self.stopped.value = os.getpid()
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 0 and batch_idx == 8:
            self.alone.set()


def test_a_worker_that_is_stopped_past_its_lease_is_left_behind(caplog):
    """It wakes up, is told that it counts no more, and ends alone."""

    def wake():
        assert Stops.alone.wait(50)
        os.kill(Stops.stopped.value, signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    trainer = make_trainer(ParameterServerStrategy("ssp", 1, lease=2.5), 2, max_epochs=1, **OWN_ROWS)
    trainer.fit(Stops((9, 9)), val_dataloaders=row_loader((5,)))
    thread.join()
    assert trainer.callback_metrics["steps"] == 9
    assert "Worker 1 is gone (it was silent for longer than its lease of 2.5 s)" in caplog.text


class Zero(Dies):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 0 and self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return Classifier.training_step(self, batch, batch_idx)


def test_rank_zero_ends_the_run_when_it_is_killed():
    with pytest.raises(StageError, match="lost rank 0: its process ended"):
        make_trainer(ParameterServerStrategy("ssp"), 2, max_epochs=2, **OWN_ROWS).fit(
            Zero((5, 5)), val_dataloaders=row_loader((5,))
        )


class Fails(Shares):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            raise KeyError("no such row")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("consistency", ["bsp", "async"])
def test_an_exception_of_a_worker_ends_all_with_it_as_the_cause(consistency):
    began = time.monotonic()
    with pytest.raises(
        StageError, match=r"rank 1 failed in training_step \(epoch 0, batch 2\): KeyError: 'no such row'"
    ) as caught:
        make_trainer(ParameterServerStrategy(consistency), 2, max_epochs=900, **OWN_ROWS).fit(
            Fails((4, 4)), val_dataloaders=row_loader((5,))
        )
    assert isinstance(caught.value.__cause__, KeyError)
    assert time.monotonic() - began < 30
    assert not multiprocessing.active_children()


class Parts(Classifier):
    """One rank saves where the others do not."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 0 and batch_idx == 1:
            self.trainer.save_checkpoint("never.ckpt")


def test_workers_that_wait_for_different_things_are_told():
    with pytest.raises(
        StageError, match=r"All workers wait, but not for the same: rank 0 waits for .*; rank 1 waits for "
    ):
        fit(ParameterServerStrategy("async"), 2, Parts)


class Waits(Classifier):
    """Tells the test when its training is under way."""

    started = multiprocessing.get_context("fork").Event()
    killed = multiprocessing.get_context("fork").Event()

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.current_epoch == 0:
            self.started.set()
            assert self.killed.wait(20)
        return super().training_step(batch, batch_idx)


@contextmanager
def killing_a_server():
    """Kills one when training is under way."""
    Waits.started.clear()
    Waits.killed.clear()

    def kill():
        assert Waits.started.wait(30)
        server = next(child for child in multiprocessing.active_children() if child.name.startswith("s0."))
        os.kill(server.pid, signal.SIGKILL)
        Waits.killed.set()

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()


def test_a_server_that_is_killed_is_not_missed():
    """With two replicas of three servers; the run ends as it would have."""
    with killing_a_server():
        module = fit(ParameterServerStrategy(num_servers=3, replication=2, lease=3.0), 2, Waits)[1]
    assert_equal(module, fit("auto")[1], **WEIGHTS)


def test_the_only_server_of_weights_is_missed_in_words():
    with (
        killing_a_server(),
        pytest.raises(StageError, match=r"server s0 has ended, and weights with it \(replication=1\)"),
    ):
        fit(ParameterServerStrategy("ssp"), 2, Waits)


# -- what is measured --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"consistency": "ssp", "staleness": 1}, {"consistency": "bsp"}], ids=str)
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
