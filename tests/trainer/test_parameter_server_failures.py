"""Workers and servers that die, stop, fail, or wait for different things."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from lightning_parallel.errors import StageError
from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import WEIGHTS, make_trainer
from tests.trainer.servers import OWN_ROWS, Shares, assert_equal, fit, slow

pytestmark = pytest.mark.timeout(60)


class Dies(Shares):
    """One of its workers is killed in its third step."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("consistency", ["bsp", slow("ssp")])
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("consistency", [slow("bsp"), "async"])
def test_an_exception_of_a_worker_ends_all_and_is_raised(consistency):
    began, others = time.monotonic(), multiprocessing.active_children()
    with pytest.raises(KeyError, match=r"rank 1 failed in training_step \(epoch 0, batch 2\)\n") as caught:
        make_trainer(ParameterServerStrategy(consistency), 2, max_epochs=900, **OWN_ROWS).fit(
            Fails((4, 4)), val_dataloaders=row_loader((5,))
        )
    assert caught.value.args == ("no such row",)
    assert time.monotonic() - began < 30
    assert [child for child in multiprocessing.active_children() if child not in others] == []


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


@pytest.mark.slow
def test_a_server_that_is_killed_is_not_missed():
    """With two replicas of three servers; the run ends as it would have."""
    with killing_a_server():
        module = fit(ParameterServerStrategy(num_servers=3, replication=2, lease=3.0), 2, Waits)[1]
    assert_equal(module, fit("auto")[1], **WEIGHTS)


@pytest.mark.slow
def test_the_only_server_of_weights_is_missed_in_words():
    with (
        killing_a_server(),
        pytest.raises(StageError, match=r"server s0 has ended, and weights with it \(replication=1\)"),
    ):
        fit(ParameterServerStrategy("ssp"), 2, Waits)
