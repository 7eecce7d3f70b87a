"""`start_method="fork"` and `"spawn"`: ranks are processes of this one, which waits for them.

The one idea: whatever a rank raises, the parent raises, with the user's own exception as the cause. No rank outlives
the call, and what rank 0 has (weights, metrics, callbacks' state) comes back. Left out: several hosts.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.multiprocessing as mp
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork, _check_missing_main_guard
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot, _WorkerOutput
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lightning_parallel.errors import Failure, StageError, add_note
from lightning_parallel.failure.aborts import is_communication_error
from lightning_parallel.failure.party import lost
from lightning_parallel.failure.watch import Watch
from lightning_parallel.trainer.failures import exit_hint, reported, tell

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LOOK_S = 0.2
_TERMINATE_S = 1.5
_SIGTERM_S = 25.0


class ProcessLauncher(_MultiProcessingLauncher):
    """Forks or spawns all ranks and raises in this process what one of them raised.

    Args:
        strategy: its attribute ``watch`` (in a rank) is told of exceptions.
        start_method: "fork" (works in notebooks) or "spawn".
        patience_s: how long the other ranks may take to end by themselves after a failure.
    """

    def __init__(self, strategy: Any, start_method: Any, patience_s: float = 8.0) -> None:
        super().__init__(strategy, start_method)
        self._strategy: Any = strategy
        self._patience_s = patience_s
        self._weights: dict[str, Any] | None = None

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function on every rank and return what rank 0 returned."""
        self._check(trainer)
        with self._port():
            states = _GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
            job = (self, trainer, function, args, kwargs, states)
            children = _Children(self._start_method, self._strategy.num_processes, job)
        self.procs = children.processes
        try:
            with children.forwarded_sigterm():
                output = children.wait(self._patience_s)
        finally:
            children.end()
        return output if trainer is None else self._take_back(output, trainer)

    def joined(self, watch: Watch) -> None:
        """The ranks are connected. (Their parent sees by itself how each of them ends.)"""

    def keep_weights(self, state_dict: Callable[[], dict[str, Any]]) -> None:
        """Called by the strategy on every rank before it disconnects: gather the weights that the parent gets back."""
        weights = state_dict()
        if self._strategy.global_rank == 0:
            self._weights = move_data_to_device(weights, "cpu")

    def _check(self, trainer: Trainer | None) -> None:
        if self._start_method == "spawn":
            _check_missing_main_guard()
        else:
            _check_bad_cuda_fork()
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                f"trainer.fit() was called twice on one Trainer with start_method={self._start_method!r}, whose ranks"
                " have ended. Make a new Trainer and continue with fit(ckpt_path=...)."
            )

    @contextmanager
    def _port(self) -> Iterator[None]:
        """All ranks learn one free port from the environment; the next run finds another."""
        before = os.environ.get("MASTER_PORT")
        os.environ["MASTER_PORT"] = str(self._strategy.cluster_environment.main_port)
        try:
            yield
        finally:
            if before is None:
                del os.environ["MASTER_PORT"]

    # -- results -------------------------------------------------------------------------------------------------------

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        if self._strategy.local_rank != 0:
            return None
        path = None
        if trainer.state.fn == TrainerFn.FITTING:
            path = os.path.join(tempfile.mkdtemp(prefix="lightning-parallel-"), "weights.ckpt")
            self._strategy.checkpoint_io.save_checkpoint(self._final_weights(trainer), path)
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return _WorkerOutput(best, path, trainer.state, results, self.get_extra_results(trainer))

    def _final_weights(self, trainer: Trainer) -> dict[str, Any]:
        if self._weights is not None:
            return self._weights
        return {name: value for name, value in trainer.lightning_module.state_dict().items() if not value.is_meta}

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        states = move_data_to_device(call._call_callbacks_state_dict(trainer), "cpu")
        return {**super().get_extra_results(trainer), "callbacks": states}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state = extra["callbacks"].get(callback.state_key)
            if state:
                if "dirpath" in state and hasattr(callback, "dirpath"):
                    callback.dirpath = state["dirpath"]  # a ModelCheckpoint drops its scores if that differs
                callback.load_state_dict(state)

    def _take_back(self, output: _WorkerOutput, trainer: Trainer) -> Any:
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        try:
            self._recover_results_in_main_process(output, trainer)
        finally:
            if output.weights_path is not None:
                shutil.rmtree(os.path.dirname(output.weights_path), ignore_errors=True)
        return output.trainer_results

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_weights": None}


class _Children:
    """The ranks' processes and what they answered."""

    def __init__(self, start_method: str, count: int, job: tuple) -> None:
        context: Any = mp.get_context(start_method)
        self.processes: list[Any] = []
        self._pipes: dict[Connection, int] = {}
        self._answers: dict[int, Any] = {}
        self._errors: list[BaseException] = []  # in the order in which they came
        self._deadline, self._terminated = float("inf"), False
        self._given_up: set[int] = set()
        try:
            for rank in range(count):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank_main, args=(rank, *job, theirs), daemon=False)
                process.start()
                theirs.close()
                self.processes.append(process)
                self._pipes[ours] = rank
        except BaseException:
            self.end()
            raise

    def wait(self, patience_s: float) -> Any:
        """What rank 0 answered, once all ranks have; or the exception of the run."""
        open_pipes = dict(self._pipes)
        while open_pipes and time.monotonic() < self._deadline:
            for pipe in wait(list(open_pipes), timeout=_LOOK_S):
                assert isinstance(pipe, Connection)
                if not self._read(pipe, open_pipes.pop(pipe)):
                    self._deadline = min(self._deadline, time.monotonic() + patience_s)
        if self._terminated:
            raise SIGTERMException
        if len(self._answers) < len(self.processes):
            self._raise()
        return self._answers[0]

    def _read(self, pipe: Connection, rank: int) -> bool:
        """Whether the rank answered; otherwise why not."""
        try:
            returned, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            self.processes[rank].join(_TERMINATE_S)
            return False
        if returned:
            self._answers[rank] = value
        else:
            self._errors.append(_with_traceback(Failure.from_bytes(value)))
            self._give_up(getattr(self._errors[-1], "lost_rank", None))
        return returned

    def _give_up(self, lost_rank: int | None) -> None:
        """A rank that the others have lost is not waited for."""
        if lost_rank is not None and self.processes[lost_rank].is_alive():
            self._given_up.add(lost_rank)
            self.processes[lost_rank].kill()

    def _raise(self) -> NoReturn:
        """The exception that the run ends with: the first that is not the echo of another."""
        codes = {rank: child.exitcode for rank, child in enumerate(self.processes) if rank not in self._given_up}
        dead = {rank: hint for rank, code in codes.items() if (hint := _killed(code))}
        errors = sorted(self._errors, key=is_communication_error)
        error = errors[0] if errors else None
        if isinstance(error, StageError) and (lost_rank := error.lost_rank) in dead:
            self._raise_lost(lost_rank, error.stage, dead[lost_rank])
        if dead and (error is None or is_communication_error(error)):
            rank = min(dead)
            self._raise_lost(rank, None, dead[rank])
        if error is None:
            rank, code = next((rank, code) for rank, code in codes.items() if rank not in self._answers)
            self._raise_lost(rank, None, exit_hint(code) or "it did not end by itself")
        raise error

    def _raise_lost(self, rank: int, stage: int | None, hint: str) -> NoReturn:
        others = [other for other in range(len(self.processes)) if other != rank]
        raise lost(rank, stage, f"its process ended ({hint})").to_error(others)

    @contextmanager
    def forwarded_sigterm(self) -> Iterator[None]:
        """SIGTERM to this process ends the ranks, which may still write a checkpoint."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self._terminate())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _terminate(self) -> None:
        self._terminated = True
        self._deadline = time.monotonic() + _SIGTERM_S
        self._signal(signal.SIGTERM)

    def _signal(self, signum: int) -> None:
        for process in self.processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)

    def end(self) -> None:
        """Leave no process behind."""
        for signum in (0, signal.SIGTERM, signal.SIGKILL):  # 0: those that have answered are about to end
            self._signal(signum)
            deadline = time.monotonic() + _TERMINATE_S
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        for pipe in self._pipes:
            pipe.close()


def _with_traceback(failure: Failure) -> BaseException:
    """The exception as it came, with the traceback that it had in its own process."""
    error = failure.error
    assert error is not None
    origin = error.__cause__ or error
    if not getattr(origin, "__notes__", None):  # a StageError of another rank than this one has it already
        add_note(origin, f"on rank {failure.rank}:\n{failure.traceback_text.rstrip()}")
    return error


def _killed(code: int | None) -> str | None:
    return exit_hint(code) if code is not None and code < 0 else None


class _Answer:
    """Where `_wrapping_function` puts rank 0's results; by value, since the memory of this process goes with it."""

    def __init__(self) -> None:
        self.value: Any = None

    def put(self, value: Any) -> None:
        self.value = value


def _rank_main(
    rank: int,
    launcher: ProcessLauncher,
    trainer: Trainer | None,
    function: Callable,
    args: tuple,
    kwargs: dict,
    states: Any,
    pipe: Connection,
) -> None:
    """What a rank's process runs."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if launcher._start_method == "fork":
        torch.set_num_threads(
            1
        )  # the threads of the parent's OpenMP are not in this process, and waiting for them hangs
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    answer = _Answer()
    try:
        with reported(launcher._strategy, trainer):
            launcher._wrapping_function(rank, trainer, function, args, kwargs, cast(Any, answer), states)
        blob = pickle.dumps((True, answer.value))
    except BaseException as error:
        _fail(launcher, trainer, rank, error, pipe)
    pipe.send_bytes(blob)


def _fail(
    launcher: ProcessLauncher, trainer: Trainer | None, rank: int, error: BaseException, pipe: Connection
) -> NoReturn:
    """Tell the parent first, since the rest may not come to an end."""
    shown = error if isinstance(error, Exception) else tell(launcher._strategy, trainer, error) or error
    text = "".join(traceback.format_exception(error.__cause__ or error))
    pipe.send_bytes(pickle.dumps((False, Failure(rank, error=shown, traceback_text=text).to_bytes())))
    with suppress(Exception):
        launcher._strategy.on_exception(error)
        if trainer is not None:
            trainer._teardown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
