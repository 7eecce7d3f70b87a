"""torch's L-BFGS whose vectors lie on the servers, under a Trainer: beside one process on the rows of all workers."""

import multiprocessing
import os
import signal

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import chain, rows
from tests.trainer.pipelines import make_trainer
from tests.trainer.servers import OWN_ROWS, assert_equal, slow
from tests.trainer.test_parameter_server import Dealt
from tests.trainer.test_parameter_server_failures import Waits, killing_a_server

pytestmark = pytest.mark.timeout(60)
# One process makes the steps' arithmetic in 32 bits, the servers in 64, and every step of L-BFGS multiplies the
# difference; one process in 64 bits is as far from one in 32 in these runs (1e-6; without the penalty 1e-3).
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
OPTIONS = {
    "fixed": {"lr": 0.2, "max_iter": 4},
    "wolfe": {"lr": 0.5, "max_iter": 3, "line_search_fn": "strong_wolfe"},
    "mild": {"lr": 0.2, "max_iter": 2},  # clipped, the others without a line search are one process's in 64 bits alone
    "short": {"lr": 0.2, "max_iter": 3, "history_size": 2},
}


def together(**options):
    return ParameterServerStrategy("sandblaster", **options)


class Whole(Dealt):
    """All workers' rows of a step are twelve."""

    options = OPTIONS["fixed"]

    def __init__(self):
        super().__init__()
        self.net = chain(2)

    def loss(self, batch):
        return super().loss(batch) + 0.02 * sum(p.square().sum() for p in self.parameters())

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), **self.options)


class Wolfe(Whole):
    options = OPTIONS["wolfe"]


def run(strategy, count, make=Whole, checkpoint=None, callbacks=(), **options):
    torch.manual_seed(1)
    module, trainer = make(), make_trainer(strategy, count, callbacks, **{"max_epochs": 1, **OWN_ROWS, **options})
    trainer.fit(module, ckpt_path=checkpoint)
    return module, trainer


@pytest.mark.parametrize(("name", "devices", "servers"), [
    slow("fixed", 2, 1), ("wolfe", 2, 2), slow("short", 3, 1), slow("wolfe", 1, 1), slow("fixed", 3, 2)
])  # fmt: skip
def test_l_bfgs_on_the_servers_is_that_of_one_process_on_all_rows(name, devices, servers):
    make = type(name, (Whole,), {"options": OPTIONS[name]})
    plain, wanted = run("auto", 1, make)
    ours, trainer = run(together(num_servers=servers), devices, make)
    assert_equal(ours, plain, **CLOSE)
    for key in ("val_loss", "accuracy"):
        torch.testing.assert_close(trainer.callback_metrics[key], wanted.callback_metrics[key], **CLOSE)


@pytest.mark.parametrize(("name", "clip"), [
    ("mild", {"gradient_clip_val": 0.2}),
    slow("wolfe", {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    slow("wolfe", {"gradient_clip_val": 0.2}),
    slow("fixed", {"gradient_clip_val": 100.0}),
])  # fmt: skip
def test_the_gradient_of_all_rows_is_clipped_as_one_process_clips_it(name, clip):
    """In every evaluation, and not the portions' gradients: an unclipped run ends elsewhere."""
    make = type(name, (Whole,), {"options": OPTIONS[name]})
    plain, _ = run("auto", 1, make, **clip)
    assert_equal(run(together(num_servers=2), 3, make, **clip)[0], plain, **CLOSE)
    if clip["gradient_clip_val"] < 1:
        with pytest.raises(AssertionError):
            assert_equal(run("auto", 1, make)[0], plain, rtol=1e-2, atol=1e-2)


class Uneven(Whole):
    """Worker r has 4 + 4 r rows of every twelve."""

    def train_dataloader(self):
        x, y = rows([48])[0]
        parts = [slice(0, 4), slice(4, 12)] if self.trainer.world_size == 2 else [slice(0, 12)]
        part = parts[self.global_rank]
        batches = [(x[12 * k : 12 * k + 12][part], y[12 * k : 12 * k + 12][part]) for k in range(4)]
        return DataLoader(batches, batch_size=None)


def test_a_step_is_of_the_mean_over_all_rows():
    assert_equal(run(together(), 2, Uneven)[0], run("auto", 1, Uneven)[0], **CLOSE)


class Dies(Whole):
    """Worker 1 is killed in its second step, with its portion in hand."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def test_the_portion_of_a_killed_worker_is_done_by_another(caplog):
    """The step in which it dies has its rows all the same; later ones are of those that are left."""
    ours, _ = run(together(lease=30.0), 3, Dies)
    assert_equal(ours, reference([[0, 1, 2], [0, 1, 2], [0, 2], [0, 2]]), **CLOSE)
    assert "Worker 1 is gone (SIGKILL" in caplog.text


class DiesWithDealtRows(Dies):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*rows([48])[0]), 4)


@pytest.mark.slow
def test_the_rows_that_a_killed_worker_leaves_are_dealt():
    """Of its four batches two are in steps that were begun; each of the others gets one of the other two."""
    module, _ = run(together(lease=30.0), 3, DiesWithDealtRows, use_distributed_sampler=True)
    steps = [[(rank, step) for rank in ranks] for step, ranks in enumerate([[0, 1, 2], [0, 1, 2], [0, 2], [0, 2]])]
    shares = [list(DistributedSampler(range(48), 3, rank, seed=0)) for rank in range(3)]
    assert_equal(module, reference([*steps, [(1, 2), (1, 3)]], shares), **CLOSE)


def reference(steps, shares=None, workers=3):
    """One process whose steps are of given batches of workers' shares, or of those of some workers, one by one."""
    torch.manual_seed(1)
    module, own = Whole(), 12 // workers
    optimizer, (x, y) = module.configure_optimizers(), rows([48])[0]
    for number, step in enumerate(steps):
        pairs = [one if isinstance(one, tuple) else (one, number) for one in step]
        rows_of = shares or [list(range(rank, 48, workers)) for rank in range(workers)]
        chosen = [row for rank, k in pairs for row in rows_of[rank][k * own :][:own]]
        batch = x[chosen], y[chosen]

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = module.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    return module


class Stalls(Whole):
    """Worker 1 waits in its first step until the other has made it, without worker 1's portion."""

    made = multiprocessing.get_context("fork").Event()

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 0 and not self.made.is_set():
            assert self.made.wait(30)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.made.set()


def test_a_late_portion_is_done_by_an_idle_worker():
    """Else nobody would go on: worker 1 waits for the end of the step."""
    assert_equal(run(together(), 2, Stalls)[0], reference([[0, 1]] * 4, workers=2), **CLOSE)


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


class WaitsForADeath(Whole):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and not Waits.killed.is_set():
            Waits.started.set()
            assert Waits.killed.wait(20)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_a_server_that_is_killed_in_a_step_is_not_missed():
    """The vectors of L-BFGS are with its replicas too."""
    with killing_a_server():
        ours, _ = run(together(num_servers=3, replication=2, lease=3.0), 2, WaitsForADeath)
    assert_equal(ours, reference([[0, 1]] * 4, workers=2), **CLOSE)


@pytest.mark.slow
def test_it_resumes_with_the_state_of_l_bfgs(tmp_path):
    """From the servers' checkpoint in one process, and from one process's on the servers."""
    plain, _ = run("auto", 1, max_epochs=2)
    for name, first, then in (("ours", (together(), 2), ("auto", 1)), ("theirs", ("auto", 1), (together(), 2))):
        run(*first, callbacks=[Saves(tmp_path / name)])
        resumed, _ = run(*then, checkpoint=tmp_path / name, max_epochs=2)
        assert_equal(resumed, plain, rtol=1e-3, atol=1e-3)
    ours, theirs = (torch.load(tmp_path / name)["optimizer_states"][0] for name in ("ours", "theirs"))
    assert ours["param_groups"] == theirs["param_groups"]
    assert {k: type(v) for k, v in ours["state"][0].items()} == {k: type(v) for k, v in theirs["state"][0].items()}
    torch.testing.assert_close(ours["state"][0]["old_dirs"], theirs["state"][0]["old_dirs"], **CLOSE)


class Gathers(Whole):
    def training_step(self, batch, batch_idx):
        self.all_gather(torch.zeros(1))
        return super().training_step(batch, batch_idx)


class ClipsItself(Whole):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 1.0, "norm")


class Descent(Whole):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(("make", "options", "words"), [
    (Gathers, {}, "a step asks for values of all of all workers"),
    (Descent, {}, "has the servers make the steps of torch.optim.LBFGS, and configure_optimizers returned SGD"),
    (Whole, {"accumulate_grad_batches": 2}, "an L-BFGS evaluates its step's rows again and again"),
    (ClipsItself, {}, "ClipsItself has a configure_gradient_clipping of its own"),
])  # fmt: skip
def test_what_cannot_be_is_refused(make, options, words):
    with pytest.raises(ValueError, match=words):
        run(together(), 2, make, **options)


@pytest.mark.parametrize(("options", "words"), [
    ({"update": "worker"}, "update='worker' with consistency=\"sandblaster\": nobody pushes"),
    ({"n_push": 2}, 'n_push=2 with consistency="sandblaster"'),
    ({"staleness": 3}, "nothing is stale"),
    ({"island_size": 2}, "portions of a step are given to single workers"),
    ({"restarts": 1}, "portions of a step are given to single workers"),
])  # fmt: skip
def test_arguments_that_do_not_go_with_it_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        together(**options)
