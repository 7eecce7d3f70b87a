"""The strings for `Trainer(strategy=...)`; importing this module registers them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_parallel.strategies.pipeline import PipelineStrategy
from lightning_parallel.strategies.zero import ZeROStrategy

STRINGS: dict[str, dict[str, Any]] = {f"pipeline_{name}": {"schedule": name} for name in ("gpipe", "1f1b", "naive")}
ZERO_STRINGS: dict[str, dict[str, Any]] = {f"zero_{stage}": {"stage": stage} for stage in (1, 2, 3)}


def register() -> None:
    """Register every string that is not registered yet."""
    for string, arguments in STRINGS.items():
        if string not in StrategyRegistry:
            description = f"PipelineStrategy with schedule {arguments['schedule']}"
            StrategyRegistry.register(string, PipelineStrategy, description=description, **arguments)
    for string, arguments in ZERO_STRINGS.items():
        if string not in StrategyRegistry:
            description = f"ZeROStrategy, stage {arguments['stage']}"
            StrategyRegistry.register(string, ZeROStrategy, description=description, **arguments)


register()
