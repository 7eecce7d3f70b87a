"""How the ranks of a run are started."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_parallel.trainer.failure.reports import reported
from lightning_parallel.trainer.launch.process_launcher import ProcessLauncher
from lightning_parallel.trainer.launch.script_launcher import ScriptLauncher

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class InProcess(_Launcher):
    """Starts nothing: a run of one rank, whose failures are told as those of others are.

    Args:
        strategy: see `reported`.
    """

    is_interactive_compatible = True

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function."""
        with reported(self._strategy, trainer):
            return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """There is nobody."""


def make_launcher(strategy: Any) -> ScriptLauncher | ProcessLauncher | InProcess:
    """The launcher of a strategy's ``start_method``; under torchrun or SLURM, which start ranks themselves, a guard."""
    if strategy.num_processes * strategy.num_nodes == 1:
        return InProcess(strategy)
    if strategy.start_method == "popen" or strategy.cluster_environment.creates_processes_externally:
        return ScriptLauncher(strategy)
    return ProcessLauncher(strategy, strategy.start_method)
