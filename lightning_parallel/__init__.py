"""Model parallelism for unmodified LightningModules, every measured number beside its formula.

Names load when they are first used, so that ``import lightning_parallel`` costs milliseconds and the schedule tools
never wait for Lightning. The strategy strings (``Trainer(strategy="pipeline_1f1b")``) are registered as soon as both
this package and Lightning are imported, in either order.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_parallel._register import register_with_lightning

if TYPE_CHECKING:
    from lightning_parallel.callbacks import (
        BubbleMonitor,
        CommunicationMonitor,
        MemoryMonitor,
        StalenessMonitor,
        TimelineExporter,
    )
    from lightning_parallel.checkpoint import load_weights
    from lightning_parallel.errors import StageError
    from lightning_parallel.parameter_server.trainer.staleness_metric import Staleness
    from lightning_parallel.pipeline.schedule import Action, Schedule
    from lightning_parallel.pipeline.schedules import make as make_schedule
    from lightning_parallel.pipeline.simulator import Costs, Timeline, simulate
    from lightning_parallel.strategies import (
        HybridStrategy,
        ParameterServerStrategy,
        PipelineStrategy,
        TensorParallelStrategy,
        ZeROStrategy,
    )

__version__ = "0.1.0.dev0"

_HOMES = {
    "Action": "pipeline.schedule",
    "BubbleMonitor": "callbacks",
    "CommunicationMonitor": "callbacks",
    "Costs": "pipeline.simulator",
    "HybridStrategy": "strategies",
    "MemoryMonitor": "callbacks",
    "ParameterServerStrategy": "strategies",
    "PipelineStrategy": "strategies",
    "Schedule": "pipeline.schedule",
    "StageError": "errors",
    "Staleness": "parameter_server.trainer.staleness_metric",
    "StalenessMonitor": "callbacks",
    "TensorParallelStrategy": "strategies",
    "Timeline": "pipeline.simulator",
    "TimelineExporter": "callbacks",
    "ZeROStrategy": "strategies",
    "load_weights": "checkpoint",
    "make_schedule": "pipeline.schedules:make",
    "simulate": "pipeline.simulator",
}

__all__ = [
    "Action",
    "BubbleMonitor",
    "CommunicationMonitor",
    "Costs",
    "HybridStrategy",
    "MemoryMonitor",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "Schedule",
    "StageError",
    "Staleness",
    "StalenessMonitor",
    "TensorParallelStrategy",
    "Timeline",
    "TimelineExporter",
    "ZeROStrategy",
    "load_weights",
    "make_schedule",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_lightning()
