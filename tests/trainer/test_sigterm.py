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

from lightning_parallel.failure.watch import Watch
from lightning_parallel.trainer.failure.sigterm import replace_sigterm_broadcast
from tests.harness import free_port, run_ranks
from tests.ranks.test_watch import watched
from tests.trainer.test_launchers import ROOT, script_environment
from tests.trainer.watched import make_trainer


def agreeing_trainer() -> Trainer:
    trainer = make_trainer("auto", devices=1)
    trainer.training = True
    return trainer


@pytest.mark.parametrize("signalled", [0, 1, 2])
def test_all_ranks_end_before_the_same_batch(signalled: int):
    """A batch needs all ranks, as a step does; they may be a batch apart when the signal comes."""

    def batches(rank: int, port: int) -> tuple[int, bool, int | None]:
        trainer, watch = agreeing_trainer(), watched(rank, 3, port)
        restore = replace_sigterm_broadcast(trainer, watch)
        loop = trainer.fit_loop.epoch_loop
        for batch in range(10_000):
            if (rank, batch) == (signalled, 4):
                trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
            try:
                loop._broadcast_sigterm_tensor()
            except SIGTERMException:
                break
            dist.all_reduce(torch.ones(1))
        restore()
        watch.stop()
        return batch, trainer.received_sigterm, watch.last_batch.asked_by

    results = run_ranks(batches, 3, free_port(), group=False)
    assert len({batch for batch, _, _ in results}) == 1
    assert {known for _, known, _ in results} == {True}
    assert {rank for _, _, rank in results} == {signalled}


@pytest.mark.parametrize("apart", [0, 1])
def test_a_signal_in_a_batch_ends_all_behind_the_one_that_somebody_has_begun(apart: int):
    """Rank 0 is in batch 4 when rank 1, in batch 4 or 3, is told."""

    def batches(rank: int, port: int) -> int:
        watch = watched(rank, 2, port)
        for _ in range(4 - apart * rank):
            assert watch.begin_batch()
        dist.barrier()
        if rank:
            watch.ask_to_end()
        count = 4 - apart * rank
        while watch.begin_batch():  # rank 0 begins more before it hears of it
            count += 1
        watch.stop()
        return count

    first, second = run_ranks(batches, 2, free_port(), group=False)
    assert first == second


def test_lightnings_methods_come_back():
    trainer = agreeing_trainer()
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    before = loop._broadcast_sigterm_tensor, connector._sigterm_notifier_fn
    restore = replace_sigterm_broadcast(trainer, Watch(0, 1))
    assert restore
    assert loop._broadcast_sigterm_tensor != before[0]
    assert not replace_sigterm_broadcast(trainer, Watch(0, 1)), "replaced already"
    restore()
    restore()
    assert (loop._broadcast_sigterm_tensor, connector._sigterm_notifier_fn) == before


def test_a_lightning_that_changed_is_left_alone(monkeypatch):
    trainer = agreeing_trainer()
    monkeypatch.setattr(type(trainer.fit_loop.epoch_loop), "_broadcast_sigterm_tensor", lambda self, more: None)
    assert not replace_sigterm_broadcast(trainer, Watch(0, 1))
    assert "_broadcast_sigterm_tensor" not in trainer.fit_loop.epoch_loop.__dict__


def test_outside_training_a_signal_is_known_at_once():
    trainer = agreeing_trainer()
    replace_sigterm_broadcast(trainer, Watch(0, 1))
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
    script, ranks = start("--agrees", "--start-method", start_method)
    os.kill(script.pid if signalled == "script" else ranks[1], signal.SIGTERM)
    errors = finish(script, ranks)
    assert script.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors
    if signalled == "rank 1":
        assert "rank 1 was told to end (SIGTERM), and all ranks with it" in errors


@pytest.mark.parametrize("start_method", [pytest.param("popen", marks=pytest.mark.slow), "fork"])
def test_an_interrupt_ends_all_ranks(start_method: str):
    script, ranks = start("--start-method", start_method)
    os.killpg(script.pid, signal.SIGINT)
    errors = finish(script, ranks)
    assert script.returncode == 1
    assert "StageError" not in errors
    assert "Detected KeyboardInterrupt" in errors
