"""`start_method="popen"`: the script runs once more for every other rank of this host.

The one idea: Lightning's launcher kills all ranks five seconds after one ended badly, before the user's exception is
known. Ours leaves the ending to the watch, which every rank has once they are connected, and covers the time before: a
script that ends before it joins ends rank 0 too. Left out: other hosts before they are connected.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lightning_parallel.failure.watch import Watch
from lightning_parallel.ports import ReservedPort
from lightning_parallel.secret import Secret
from lightning_parallel.trainer.failure.reports import exit_hint, reported
from lightning_parallel.trainer.launch.main_port import main_port

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_PARENT = "LIGHTNING_PARALLEL_LAUNCHER"
_LOOK_S = 0.2


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script once more for every other rank of this host; under torchrun or SLURM it only guards the run.

    Args:
        strategy: its attribute ``watch`` is told of exceptions.
        patience_s: how long the other ranks may take to end after a failure, once rank 0's script has ended.

    Attributes:
        will_part: whether a run goes on, at whose end, after the Trainer's last hooks, the strategy's `part` is called.
    """

    def __init__(self, strategy: Any, patience_s: float = 6.0) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy, self._patience_s = strategy, patience_s
        self.will_part = False

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks unless they run already, then call the function on this one."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        alone = self.num_processes * self.num_nodes == 1
        if not alone and not self.cluster_environment.creates_processes_externally:
            refuse_no_script(type(self._strategy).__name__)
            port, _family.reserved = main_port(self.cluster_environment)
            os.environ["MASTER_PORT"] = str(port)
            os.environ[_PARENT] = str(os.getpid())
            secret = Secret.for_ranks(self.num_nodes)
            if secret is not None:
                secret.keep()  # for as long as the family lives
            try:
                with nullcontext() if secret is None else secret.in_environment():
                    self._call_children_scripts()
            finally:
                del os.environ[_PARENT]  # of the children alone
            _family.adopt(self.procs, self._patience_s)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        _family.gather(self._strategy, trainer)
        try:
            with reported(self._strategy, trainer):
                self.will_part = hasattr(self._strategy, "part")
                result = function(*args, **kwargs)
                if self.will_part:
                    self._strategy.part()
            return result
        except BaseException as error:
            _family.fail(error)
            raise
        finally:
            self.will_part = False
            _family.disperse()

    def joined(self, watch: Watch) -> None:
        """The ranks are connected: from here on the watch finds out who is gone, helped by what the launcher knows."""
        _family.joined(watch)


def refuse_no_script(name: str) -> None:
    """Raise where there is no script to run once more: it came from the standard input or as `python -c`.

    Raises:
        ValueError: naming what starts ranks then.
    """
    if sys.argv[:1] in (["-"], ["-c"], [""]) or not sys.argv:
        source = {"-": "the standard input", "-c": "the command line (python -c)"}.get((sys.argv or [""])[0], "no file")
        raise ValueError(
            f'{name}(start_method="popen") runs the script once more for every other rank, and this one came from'
            f' {source}. Use {name}(start_method="fork"), or write it to a file.'
        )


class _Family:
    """The processes of one script: of rank 0 its children, of a child its parent. There is one in a process."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen] = []
        self.failed = False
        self.reserved: ReservedPort | None = None  # where the ranks meet; for as long as this process lives
        self._awaited_for: str | None = None  # what the ranks have yet to join, as in "trainer.fit"

    def adopt(self, children: list[subprocess.Popen], patience_s: float) -> None:
        self.children, self._patience_s = list(children), patience_s
        atexit.register(self._see_them_end)
        threading.Thread(target=self._look_after, name="lightning-parallel-children", daemon=True).start()

    def gather(self, strategy: Any, trainer: Trainer | None) -> None:
        """A run begins: until the ranks are connected, one that ended is missed."""
        if not hasattr(strategy, "watch"):
            return  # such a strategy does not say when they are
        fn = None if trainer is None else trainer.state.fn
        self._awaited_for = "the run" if fn is None else f"trainer.{fn.value}"
        if not self.children and _PARENT in os.environ:
            _end_with(int(os.environ[_PARENT]))

    def joined(self, watch: Watch) -> None:
        self._awaited_for = None
        if self.children:
            watch.lost_hint = self._hint
            if hasattr(watch, "on_exit"):
                watch.on_exit(self._kill)
        else:
            _prctl_pr_set_pdeathsig(0)  # the watch tells more gently that rank 0 is gone

    def fail(self, error: BaseException) -> None:
        """A run failed on this rank; a child that the others have lost is not waited for."""
        self.failed = True
        lost_rank = getattr(error, "lost_rank", None)
        if lost_rank is not None and 1 <= lost_rank <= len(self.children):
            self.children[lost_rank - 1].kill()

    def _kill(self) -> None:
        """Rank 0's process ends without going through its script's end."""
        for child in self.children:
            child.kill()

    def disperse(self) -> None:
        self._awaited_for = None
        if not self.children and _PARENT in os.environ:
            _prctl_pr_set_pdeathsig(0)

    def _hint(self, rank: int) -> str | None:
        if not 1 <= rank <= len(self.children):
            return None  # of another host
        return exit_hint(self.children[rank - 1].poll())

    def _look_after(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            ended = [(rank, code) for rank, child in enumerate(self.children, 1) if (code := child.poll()) is not None]
            if ended and (what := self._awaited_for) is not None:
                self._end_all(*ended[0], what)

    def _end_all(self, rank: int, code: int, what: str) -> None:
        """Rank 0's main thread may be inside a wait for that rank which nothing interrupts."""
        for child in self.children:
            child.kill()
        hint = exit_hint(code)
        where = "its own error stands above" if code else "every rank has to reach the same calls of the Trainer"
        text = f"StageError: lost rank {rank}: its script ended ({hint}) before it joined {what}; {where}\n"
        os.write(2, text.encode())
        os._exit(1)

    def _see_them_end(self) -> None:
        """At the end of rank 0's script, if a run failed: no rank outlives it for long."""
        deadline = time.monotonic() + (self._patience_s if self.failed else float("inf"))
        for child in self.children if self.failed else ():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()


def _end_with(parent: int) -> None:
    """Until the ranks are connected, the kernel ends this process if rank 0 ends."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("rank 0 has ended, and so does this rank")


_family = _Family()
