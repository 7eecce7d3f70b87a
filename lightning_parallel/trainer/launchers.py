"""How the ranks of a run are started."""

from __future__ import annotations

from typing import Any

from lightning_parallel.trainer.process_launcher import ProcessLauncher
from lightning_parallel.trainer.script_launcher import ScriptLauncher


def make_launcher(strategy: Any) -> ScriptLauncher | ProcessLauncher:
    """The launcher of a strategy's ``start_method``; under torchrun or SLURM, which start ranks themselves, a guard."""
    if strategy.start_method == "popen" or strategy.cluster_environment.creates_processes_externally:
        return ScriptLauncher(strategy)
    return ProcessLauncher(strategy, strategy.start_method)
