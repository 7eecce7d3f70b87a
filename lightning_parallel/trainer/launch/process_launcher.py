"""`start_method="fork"` and `"spawn"`: ranks are processes of this one, which waits for them.

The one idea: whatever a rank raises, the parent raises: the user's own exception. No rank outlives the call, and what
rank 0 has (weights, metrics, callbacks' state, what monitors measured) comes back. Left out: several hosts.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork, _check_missing_main_guard
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot, _WorkerOutput
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lightning_parallel.errors import Failure
from lightning_parallel.failure.watch import Watch
from lightning_parallel.mesh import has_store
from lightning_parallel.secret import Secret
from lightning_parallel.trainer.failure.reports import reported, show_notes, tell, where_of
from lightning_parallel.trainer.launch.main_port import main_port
from lightning_parallel.trainer.launch.parent_module import build_where_weights_go
from lightning_parallel.trainer.launch.rank_processes import LAST_WORDS_S, RankProcesses, told_to_end
from lightning_parallel.trainer.launch.stopped_launcher import look_after_launcher
from lightning_parallel.trainer.state.callback_states import load_callbacks, load_measured, measured_by

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


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
        self._gathered: dict[str, Any] = {}  # states of callbacks
        self._file: UnnamedFile | None = None  # for the weights
        self._secret: Secret | None = None  # of the run

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function on every rank and return what rank 0 returned."""
        self._check(trainer)
        states = _GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        self._secret = Secret.for_ranks(self._strategy.num_nodes)
        with UnnamedFile() if fits else nullcontext() as self._file:
            try:
                with self._port():
                    output = self._run((self, trainer, function, args, kwargs, states))
            except BaseException as error:
                show_notes(error)
                if trainer is not None and hasattr(self._strategy, "guard"):
                    self._strategy.guard(trainer, is_rank=False)
                raise
            else:
                return output if trainer is None else self._take_back(output, trainer)
            finally:
                self._file = self._secret = None

    def _run(self, job: tuple) -> Any:
        children = self._start(job)
        self.procs = children.processes
        try:
            with children.forwarded_sigterm():
                return children.wait(self._patience_s)
        finally:
            children.end()

    def _start(self, job: tuple) -> RankProcesses:
        return RankProcesses(self._start_method, self._strategy.num_processes, _rank_main, job)

    def joined(self, watch: Watch) -> None:
        """The ranks are connected. (Their parent sees by itself how each of them ends.)"""

    @property
    def has_fitted(self) -> bool:
        """Whether ranks that this process started have trained, and ended."""
        return self._already_fit

    def keep_weights(
        self, state_dict: Callable[[], dict[str, Any]], states: Callable[[], dict[str, Any]] = dict
    ) -> None:
        """Called by the strategy on every rank before it disconnects: gather the weights that the parent gets back.

        Args:
            state_dict: of the model.
            states: of callbacks, by key, that no rank can tell alone.
        """
        weights, gathered = state_dict(), states()
        if self._strategy.global_rank == 0:
            self._weights = move_data_to_device(weights, "cpu")
            self._gathered = move_data_to_device(gathered, "cpu")

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
        if before is not None and has_store(int(before)):  # this process runs a family of scripts, and serves it there
            del os.environ["MASTER_PORT"]
        port, reserved = main_port(self._strategy.cluster_environment)
        os.environ["MASTER_PORT"] = str(port)
        try:
            yield
        finally:
            del os.environ["MASTER_PORT"]
            if before is not None:
                os.environ["MASTER_PORT"] = before
            if reserved is not None:
                reserved.close()

    # -- results -------------------------------------------------------------------------------------------------------

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        if self._strategy.local_rank != 0:
            return None
        if self._file is not None:
            torch.save(self._final_weights(trainer), self._file.path)
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return _WorkerOutput(best, None, trainer.state, results, self.get_extra_results(trainer))

    def _final_weights(self, trainer: Trainer) -> dict[str, Any]:
        if self._weights is not None:
            return self._weights
        return {name: value for name, value in trainer.lightning_module.state_dict().items() if not value.is_meta}

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        alone = {
            key: one.state_dict()
            for one in cast(Any, trainer).callbacks
            if (key := one.state_key) not in self._gathered
        }
        states = move_data_to_device({**{key: state for key, state in alone.items() if state}, **self._gathered}, "cpu")
        progress = {"loop": trainer.fit_loop.state_dict(), "logged": move_data_to_device(trainer.logged_metrics, "cpu")}
        measured = measured_by(trainer)
        return {**super().get_extra_results(trainer), "callbacks": states, "measured": measured, **progress}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        load_callbacks(trainer, extra["callbacks"])
        load_measured(trainer, extra["measured"])
        trainer.fit_loop.load_state_dict(extra["loop"])
        trainer._logger_connector._logged_metrics.update(extra["logged"])

    def _take_back(self, output: _WorkerOutput, trainer: Trainer) -> Any:
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        if self._file is not None:
            weights = torch.load(self._file.path, map_location="cpu", weights_only=False, mmap=True)
            build_where_weights_go(trainer.lightning_module, weights)
            trainer.lightning_module.load_state_dict(weights, strict=False)  # layers may have been added or removed
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_weights": None, "_gathered": {}}


class UnnamedFile:
    """A file of this process and those that it starts, which is gone with the last of them, whatever ends them."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="lightning-parallel-")  # noqa: SIM115

    @property
    def path(self) -> str:
        """Its name in this process."""
        return f"/proc/self/fd/{self._file.fileno()}"

    def __enter__(self) -> UnnamedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __reduce__(self) -> tuple:
        return _inherited, (reduction.DupFd(self._file.fileno()),)


def _inherited(descriptor: Any) -> UnnamedFile:
    """The same file in a spawned process."""
    file = UnnamedFile.__new__(UnnamedFile)
    file._file = os.fdopen(descriptor.detach(), "r+b")
    return file


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
    look_after_launcher(rank, launcher._strategy.patience)
    if launcher._secret is not None:
        launcher._secret.keep()
    if launcher._start_method == "fork":
        torch.set_num_threads(
            1
        )  # the threads of the parent's OpenMP are not in this process, and waiting for them hangs
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    launcher._already_fit = False  # in this process
    answer = _Answer()
    try:
        with reported(launcher._strategy, trainer):
            launcher._wrapping_function(rank, trainer, function, args, kwargs, cast(Any, answer), states)
            _end_if_told(rank, trainer)
        blob = pickle.dumps((True, answer.value))
    except BaseException as error:
        _fail(launcher, trainer, rank, error, pipe)
    pipe.send_bytes(blob)


def _end_if_told(rank: int, trainer: Trainer | None) -> None:
    """Raise for a SIGTERM that came when the strategy was torn down: nothing that Lightning runs then looks for it."""
    if trainer is not None and trainer.received_sigterm:
        error = told_to_end()
        error.add_note(f"rank {rank} was told to end (SIGTERM), and all ranks with it")
        raise error


def _fail(
    launcher: ProcessLauncher, trainer: Trainer | None, rank: int, error: BaseException, pipe: Connection
) -> NoReturn:
    """Tell the parent first, since the rest may not come to an end; then do as any rank does whose run has failed."""
    told = tell(launcher._strategy, trainer, error)
    failure: Failure | None = None if told is None else launcher._strategy.watch.failure
    if failure is None:
        text = "".join(traceback.format_exception(error))
        failure = Failure(rank, None, where_of(trainer, error), error, text)
    said, blob = threading.Lock(), pickle.dumps((False, failure.to_bytes()))

    def say() -> None:
        if said.acquire(blocking=False):
            pipe.send_bytes(blob)

    if launcher._strategy.world_size == 1:  # nobody waits for it, and servers end when they hear of it
        late = threading.Timer(LAST_WORDS_S, say)
        late.daemon = True
        late.start()
    else:
        say()
    with suppress(BaseException):
        if trainer is not None:
            call._interrupt(trainer, error)
    say()
    with suppress(BaseException):
        if trainer is not None:
            trainer._teardown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
