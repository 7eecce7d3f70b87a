"""A failure anywhere ends every rank, in bounded time, with one and the same reason."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.errors import StageError
from lightning_parallel.failure.patience import Moving, Patience
from lightning_parallel.failure.watch import Watch
from lightning_parallel.secret import Secret
from tests.harness import Outcome, free_port, rank_outcomes, run_ranks

SECRET = Secret.make()
QUICK = Patience(beat_s=0.05, stale_s=1.0, blocked_s=0.6, grace_s=0.4, exit_s=0.6, cause_s=1.0)
# Nothing in these tests may take longer than its bound: silence, grace, exit and a second for two busy cores.
BOUND_S = QUICK.stale_s + QUICK.grace_s + QUICK.exit_s + 2.0


def watched(rank: int, world_size: int, port: int, patience: Patience = QUICK) -> Watch:
    """A watch, and a gloo group whose connections it may shut."""
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=timedelta(seconds=10))
    watch = Watch(rank, world_size, store, stage=world_size - 1 - rank, patience=patience, secret=SECRET)
    with watch.opening():
        group_store = dist.PrefixStore("group", store)
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=world_size)
    return watch


def receive(watch: Watch, source: int, what: str = "F0") -> torch.Tensor:
    box = torch.zeros(1)
    with watch.blocked(f"{what} from rank {source}"):
        dist.recv(box, source)
    return box


def outcomes_of(fn, world_size: int, awaited: set[int] | None = None) -> list[Outcome]:
    started = time.monotonic()
    outcomes = rank_outcomes(fn, world_size, free_port(), timeout=20.0, group=False, awaited=awaited)
    assert time.monotonic() - started < BOUND_S + 2.0
    return outcomes


def test_an_exception_is_raised_on_every_rank_with_the_same_text_and_cause():
    def step(rank: int, port: int) -> None:
        watch = watched(rank, 3, port)
        if rank == 1:
            told = watch.report(ValueError("label 7 is out of range"), "the forward of micro-batch 2")
            raise told from told.__cause__
        receive(watch, source=1)

    outcomes = outcomes_of(step, 3)
    for outcome in outcomes:
        assert type(outcome.error) is ValueError
        assert str(outcome.error) == "label 7 is out of range"
        assert outcome.error.__notes__[-1] == (
            "stage 1 (rank 1) failed in the forward of micro-batch 2\n(rank 0, 2 stopped because of it)"
        )
    assert "label 7 is out of range" in outcomes[0].error.__notes__[0]


def test_the_first_failure_wins_on_every_rank():
    def fail(rank: int, port: int) -> str:
        watch = watched(rank, 2, port)
        if rank == 0:
            receive(watch, source=1)
        told = watch.report(ValueError(f"of rank {rank}"), "a hook")
        if rank == 1:
            dist.send(torch.ones(1), 0)
        watch.stop()
        return f"{told!r}: {told.__notes__[-1]}"

    expected = "ValueError('of rank 1'): stage 0 (rank 1) failed in a hook\n(rank 0 stopped because of it)"
    assert run_ranks(fail, 2, free_port(), group=False) == [expected, expected]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named(victim: int):
    def step(rank: int, port: int) -> None:
        watch = watched(rank, 2, port)
        dist.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        receive(watch, source=victim)

    outcomes = outcomes_of(step, 2)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    assert str(outcomes[1 - victim].error) == (
        f"lost rank {victim} (stage {1 - victim}): its process ended (killed, or out of memory)\n"
        f"(rank {1 - victim} stopped because of it)"
    )


def test_a_launcher_can_say_by_what_a_rank_was_killed():
    def step(rank: int, port: int) -> None:
        watch = watched(rank, 2, port)
        watch.lost_hint = lambda lost: f"SIGKILL to {lost}"
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        receive(watch, source=1)

    assert "lost rank 1 (stage 0): its process ended (SIGKILL to 1)" in str(outcomes_of(step, 2)[0].error)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_lost_and_the_others_are_freed(victim: int):
    def step(rank: int, port: int) -> None:
        watch = watched(rank, 3, port)
        dist.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        receive(watch, source=victim)

    others = {0, 1, 2} - {victim}
    outcomes = outcomes_of(step, 3, awaited=others)
    for rank in others:
        text = str(outcomes[rank].error)
        assert text.startswith(f"lost rank {victim} (stage {2 - victim}): not heard of for ")
        assert "(stopped, or its host is gone)" in text


def test_ranks_that_wait_for_each_other_are_told_who_waits_for_what():
    def step(rank: int, port: int) -> None:
        receive(watched(rank, 2, port), source=1 - rank, what="FB"[rank] + "3")

    for outcome in outcomes_of(step, 2):
        assert isinstance(outcome.error, StageError)
        waits, _, remedy = str(outcome.error).partition("for what will not come:")[2].rpartition("\n")
        assert waits == "\n  stage 1 (rank 0): F3 from rank 1\n  stage 0 (rank 1): B3 from rank 0"
        assert remedy.startswith("All ranks have to make the calls that they make together (barrier, all_gather")


def test_ranks_that_move_a_state_for_long_are_not_stuck():
    def step(rank: int, port: int) -> int:
        watch = watched(rank, 2, port)
        started, rounds, state = time.monotonic(), 0, torch.ones(1 << 20)
        with watch.blocked(Moving("the other ranks' states")):
            while state[0].item():  # until both have seen the time go by
                state[:] = float(time.monotonic() - started < 3 * QUICK.blocked_s)
                dist.all_reduce(state, dist.ReduceOp.MIN)
                rounds += 1
        watch.stop()
        return rounds

    assert all(outcome.error is None and outcome.value > 1 for outcome in outcomes_of(step, 2))


def test_ranks_that_wait_for_a_state_that_nobody_moves_are_stuck():
    def step(rank: int, port: int) -> None:
        watch = watched(rank, 2, port)
        with watch.blocked(Moving(f"the state of rank {1 - rank}")):
            dist.recv(torch.zeros(1), 1 - rank)

    for outcome in outcomes_of(step, 2):
        assert "\n  stage 1 (rank 0): the state of rank 1\n  stage 0 (rank 1): the state of rank 0" in str(
            outcome.error
        )


def test_a_rank_that_waits_for_one_that_has_finished_is_told_so():
    def step(rank: int, port: int) -> None:
        watch = watched(rank, 2, port)
        if rank == 1:
            receive(watch, source=0)
        watch.stop()
        threading.Event().wait(BOUND_S)

    error = outcomes_of(step, 2)[1].error
    assert "stage 1 (rank 0): has finished\n  stage 0 (rank 1): F0 from rank 0" in str(error)


def test_two_waits_that_read_the_same_are_not_a_deadlock():
    def step(rank: int, port: int) -> int:
        watch = watched(rank, 2, port)
        started, rounds = time.monotonic(), 0
        while rounds < 3 or time.monotonic() - started < 3 * QUICK.blocked_s:
            with watch.blocked("a barrier"):  # rank 1 comes late, within the patience for blocked ranks
                threading.Event().wait(QUICK.blocked_s / 3 if rank else 0.0)
                more = torch.tensor([float(time.monotonic() - started < 3 * QUICK.blocked_s)])
                dist.all_reduce(more)
            rounds += 1
            if not more.item():
                break
        watch.stop()
        return rounds

    assert min(run_ranks(step, 2, free_port(), group=False)) >= 3


def test_a_main_thread_that_does_not_end_is_ended_with_the_failure_shown_last(capfd):
    def step(rank: int, port: int) -> None:
        watch = watched(rank, 2, port)
        if rank == 1:
            raise watch.report(ValueError("bad row"), "on_fit_start")
        threading.Event().wait()

    outcomes = outcomes_of(step, 2)
    assert (outcomes[0].exitcode, outcomes[0].error) == (1, None)
    shown = capfd.readouterr().err
    assert "rank 0 did not end by itself (it was in wait, " in shown
    assert shown.rstrip().endswith("stage 0 (rank 1) failed in on_fit_start\n(rank 0 stopped because of it)")
    assert "ValueError: bad row\non rank 1:\n" in shown


def test_ranks_may_finish_at_different_times_in_silence(capfd):
    def finish(rank: int, port: int) -> bool:
        watch = watched(rank, 3, port)
        dist.barrier()  # rank 0 holds the store that the others connect through
        threading.Event().wait((0.0, 0.3, 3 * QUICK.stale_s)[rank])
        watch.stop()
        watch.stop()
        return watch.failure is None

    assert run_ranks(finish, 3, free_port(), group=False) == [True, True, True]
    assert capfd.readouterr().err == ""


def test_rank_0_may_be_the_last_to_finish():
    def finish(rank: int, port: int) -> bool:
        watch = watched(rank, 2, port)
        threading.Event().wait(0.0 if rank else 2 * QUICK.stale_s)
        watch.stop()
        return watch.failure is None

    assert run_ranks(finish, 2, free_port(), group=False) == [True, True]


def test_a_second_watch_of_the_same_store_is_a_watch_of_its_own():
    def twice(rank: int, port: int) -> list[str | None]:
        store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
        Watch(rank, 2, store, patience=QUICK, secret=SECRET).stop()
        second = Watch(rank, 2, store, patience=QUICK, secret=SECRET)
        if rank == 1:
            second.report(KeyError("second"))
        error = second.cause(5.0)
        second.stop()
        return f"{error!r}: {error.__notes__[-1].splitlines()[0]}"

    assert run_ranks(twice, 2, free_port(), group=False) == ["KeyError('second'): rank 1 failed"] * 2


def test_a_failure_of_communication_without_another_cause_is_the_failure():
    def step(rank: int, port: int) -> None:
        watch = watched(rank, 2, port)
        if rank == 1:
            with watch.blocked("B0 from rank 0"):
                raise RuntimeError("[gloo] something odd")
        receive(watch, source=1)

    for outcome in outcomes_of(step, 2):
        assert type(outcome.error) is RuntimeError
        assert str(outcome.error) == "[gloo] something odd"
        assert outcome.error.__notes__[-1].startswith("stage 0 (rank 1) failed in waiting for B0 from rank 0\n")


def test_a_forked_worker_does_not_hide_the_end_of_its_rank():
    def step(rank: int, port: int) -> None:
        watch = watched(rank, 2, port)
        dist.barrier()
        if rank == 1:
            if os.fork() == 0:
                time.sleep(BOUND_S)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        assert watch.cause(0.9 * QUICK.stale_s) is not None, "the end was not noticed before the silence"

    assert outcomes_of(step, 2)[0].returned


def test_a_busy_process_that_holds_pythons_lock_is_not_lost():
    def step(rank: int, port: int) -> bool:
        watch = watched(rank, 2, port)
        if rank == 1:
            _hold_the_lock(2.5 * QUICK.stale_s)
        dist.barrier()
        watch.stop()
        last_word = torch.zeros(1)  # rank 1 stays until rank 0 is out of the barrier
        dist.send(last_word, 1) if rank == 0 else dist.recv(last_word, 0)
        return watch.failure is None

    assert run_ranks(step, 2, free_port(), group=False) == [True, True]


def _hold_the_lock(seconds: float) -> None:
    """Compute in C without letting another thread run, in one piece."""
    started, size = time.monotonic(), 1 << 15
    while True:
        begun = time.monotonic()
        pow(3, size)  # one long multiplication holds the lock
        if time.monotonic() - begun > seconds or time.monotonic() - started > 10 * seconds:
            return
        size *= 2


def test_interrupts_stay_what_they_are_and_are_reported():
    watch = Watch(0, 1)
    interrupt = KeyboardInterrupt()
    assert watch.report(interrupt, "fit") is interrupt
    assert watch.cause(0.0) is interrupt
    assert interrupt.__notes__ == ["rank 0 failed in fit"]


def test_one_rank_alone_needs_no_thread():
    threads = threading.active_count()
    watch = Watch(0, 1, stage=0)
    error = ValueError("x")
    assert watch.report(error, "a hook") is error
    assert error.__notes__ == ["stage 0 (rank 0) failed in a hook"]
    assert threading.active_count() == threads
    watch.stop()


def test_marking_a_wait_costs_less_than_a_microsecond():
    watch = Watch(0, 1)
    best = min(_seconds_per_mark(watch) for _ in range(5))
    assert best < 1e-6


def _seconds_per_mark(watch: Watch, count: int = 20_000) -> float:
    started = time.perf_counter()
    for _ in range(count):
        watch.waiting = "F3 from rank 0"
        watch.progress += 1
        watch.waiting = None
    return (time.perf_counter() - started) / count


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_ranks_part_when_all_have_come_to_the_end_or_fail_with_one_that_has_not(failing: int | None):
    def end(rank: int, port: int) -> None:
        watch = watched(rank, 3, port)
        dist.barrier()  # all are connected: gloo fails where one closes while another still connects
        dist.destroy_process_group()
        if rank == failing:
            told = watch.report(KeyError("late"), "teardown")
            raise told from told.__cause__
        watch.part()
        watch.stop()

    outcomes = outcomes_of(end, 3)
    for outcome in outcomes:
        assert outcome.returned == (failing is None)
        assert failing is None or type(outcome.error) is KeyError


@pytest.mark.parametrize("victim", [0, 1])
def test_a_watch_that_fails_ends_its_rank_in_words(victim: int, capfd):
    """Its main thread computes, and would never hear of anything."""

    def step(rank: int, port: int) -> None:
        watch = watched(rank, 2, port)
        dist.barrier()
        if rank == victim:
            watch._party.beat = None  # type: ignore[union-attr, method-assign, assignment]
        threading.Event().wait()

    outcomes = outcomes_of(step, 2)
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    words = f"the watch of rank {victim} over the others has failed, so no failure of theirs would be seen: TypeError"
    assert words in capfd.readouterr().err
