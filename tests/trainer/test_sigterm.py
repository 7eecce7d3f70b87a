"""SIGTERM and Ctrl-C end all ranks, in the same step where that can be agreed, and Lightning's methods come back."""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_parallel.trainer.sigterm import replace_sigterm_broadcast
from tests.harness import run_ranks
from tests.trainer.test_launchers import ROOT, script_environment
from tests.trainer.watched import make_trainer


def agreeing_trainer() -> Trainer:
    trainer = make_trainer("auto", devices=1)
    trainer.training = True
    return trainer


@pytest.mark.parametrize("signalled", [0, 1])
def test_all_ranks_end_before_the_same_batch(signalled: int):
    def batches(rank: int) -> tuple[int, bool, float]:
        trainer = agreeing_trainer()
        restore = replace_sigterm_broadcast(trainer, dist.group.WORLD, every_n_steps=3)
        loop = trainer.fit_loop.epoch_loop
        for batch in range(100):
            if (rank, batch) == (signalled, 4):
                trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
                assert not trainer.received_sigterm, "it would end this rank alone"
            try:
                loop._broadcast_sigterm_tensor()
            except SIGTERMException:
                break
        restore(failed=True)
        return batch, trainer.received_sigterm

    assert run_ranks(batches, 2) == [(8, True), (8, True)]


def test_the_device_is_not_read():
    trainer = agreeing_trainer()

    class NoDevice:
        launcher = None

        @property
        def root_device(self) -> torch.device:
            raise AssertionError("the device is left alone")

    def batches(rank: int) -> bool:
        trainer._accelerator_connector.strategy = NoDevice()
        restore = replace_sigterm_broadcast(trainer, dist.group.WORLD, every_n_steps=1)
        for _ in range(5):
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
        restore()
        return True

    assert all(run_ranks(batches, 2))


def test_lightnings_methods_come_back():
    trainer = agreeing_trainer()
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    before = loop._broadcast_sigterm_tensor, connector._sigterm_notifier_fn
    restore = replace_sigterm_broadcast(trainer, None)
    assert restore
    assert loop._broadcast_sigterm_tensor != before[0]
    assert not replace_sigterm_broadcast(trainer, None), "replaced already"
    restore()
    restore()
    assert (loop._broadcast_sigterm_tensor, connector._sigterm_notifier_fn) == before


def test_a_lightning_that_changed_is_left_alone(monkeypatch):
    trainer = agreeing_trainer()
    monkeypatch.setattr(type(trainer.fit_loop.epoch_loop), "_broadcast_sigterm_tensor", lambda self, more: None)
    assert not replace_sigterm_broadcast(trainer, None)
    assert "_broadcast_sigterm_tensor" not in trainer.fit_loop.epoch_loop.__dict__


def test_outside_training_a_signal_is_known_at_once():
    trainer = agreeing_trainer()
    replace_sigterm_broadcast(trainer, None)
    trainer.validating = True
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    assert trainer.received_sigterm


# -- scripts -----------------------------------------------------------------------------------------------------------


def hear_interrupts() -> None:
    """A shell lets what it runs in the background ignore Ctrl-C, and tests may run there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*options: str) -> tuple[subprocess.Popen, dict[int, int]]:
    """A script that trains for long, and the process ids of its ranks."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.watched", "--epochs", "100000", *options]
    script = subprocess.Popen(
        command, cwd=ROOT, env=script_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=hear_interrupts,
    )  # fmt: skip
    ranks: dict[int, int] = {}
    for line in script.stdout:
        words = line.split()
        if words[:1] == ["rank"]:
            ranks[int(words[1])] = int(words[3])
        if len(ranks) == 2:
            return script, ranks
    os.killpg(script.pid, signal.SIGKILL)
    raise AssertionError(script.communicate()[1])


def has_ended(pid: int, within_s: float) -> bool:
    """A rank closes its pipes a moment before it ends, and the script may have ended before it did."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], within_s)[0])
    finally:
        os.close(process)


def finish(script: subprocess.Popen, ranks: dict[int, int]) -> str:
    started = time.monotonic()
    with script:  # closes its pipes
        try:
            errors = script.communicate(timeout=30)[1]
            assert all(has_ended(pid, within_s=5.0) for pid in ranks.values())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
    assert time.monotonic() - started < 15.0
    return errors


@pytest.mark.parametrize(
    ("start_method", "signalled"),
    [
        pytest.param("popen", "script", marks=pytest.mark.slow),
        pytest.param("popen", "rank 1", marks=pytest.mark.slow),
        pytest.param("fork", "script", marks=pytest.mark.slow),
        ("fork", "rank 1"),
    ],
)
def test_sigterm_ends_all_ranks(start_method: str, signalled: str):
    script, ranks = start("--sigterm-every", "2", "--start-method", start_method)
    os.kill(script.pid if signalled == "script" else ranks[1], signal.SIGTERM)
    errors = finish(script, ranks)
    if (start_method, signalled) == ("fork", "rank 1"):
        assert "SIGTERMException" in errors
    else:
        assert "Traceback" not in errors


@pytest.mark.parametrize("start_method", [pytest.param("popen", marks=pytest.mark.slow), "fork"])
def test_an_interrupt_ends_all_ranks(start_method: str):
    script, ranks = start("--start-method", start_method)
    os.killpg(script.pid, signal.SIGINT)
    errors = finish(script, ranks)
    assert script.returncode == 1
    assert "StageError" not in errors
    assert "Detected KeyboardInterrupt" in errors
