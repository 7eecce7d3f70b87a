"""The strings for `Trainer(strategy=...)`; importing this module registers them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_parallel.pipeline.schedules import SCHEDULES
from lightning_parallel.strategies.pipeline import PipelineStrategy

_NOT_RUN = {"dualpipe", "chimera", "gems", "terapipe"}  # drawn and simulated only
STRINGS: dict[str, dict[str, Any]] = {
    f"pipeline_{name}": {"schedule": name} for name in (*SCHEDULES, "auto") if name not in _NOT_RUN
}


def register() -> None:
    """Register every string that is not registered yet."""
    for string, arguments in STRINGS.items():
        if string not in StrategyRegistry:
            description = f"PipelineStrategy with schedule {arguments['schedule']}"
            StrategyRegistry.register(string, PipelineStrategy, description=description, **arguments)


register()
