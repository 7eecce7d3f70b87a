"""The strings for `Trainer(strategy=...)`; importing this module registers them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_parallel.pipeline.schedules import SCHEDULES
from lightning_parallel.strategies.hybrid import HybridStrategy
from lightning_parallel.strategies.parameter_server import ParameterServerStrategy
from lightning_parallel.strategies.pipeline import PipelineStrategy
from lightning_parallel.strategies.tensor_parallel import TensorParallelStrategy
from lightning_parallel.strategies.zero import ZeROStrategy

STRINGS: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    **{f"pipeline_{name}": (PipelineStrategy, {"schedule": name}) for name in (*SCHEDULES, "auto")},
    **{f"zero_{stage}": (ZeROStrategy, {"stage": stage}) for stage in (1, 2, 3)},
    "hybrid": (HybridStrategy, {}),
    "tensor": (TensorParallelStrategy, {}),
    "parameter_server": (ParameterServerStrategy, {"consistency": "bsp"}),
    "ssp": (ParameterServerStrategy, {"consistency": "ssp"}),
}


def register() -> None:
    """Register every string that is not registered yet."""
    for string, (strategy, arguments) in STRINGS.items():
        if string not in StrategyRegistry:
            told = ", ".join(f"{name}={value}" for name, value in arguments.items())
            StrategyRegistry.register(string, strategy, description=f"{strategy.__name__} with {told}", **arguments)


register()
