"""Metrics that a pipeline cannot fill as one process does: refused in words."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import LightningModule
from torchmetrics import Metric
from torchmetrics.wrappers import MetricTracker, Running

from lightning_parallel.pipeline.runtime.assembly import Pipeline
from lightning_parallel.trainer.metrics.watched_metric import WatchedMetric


def refuse_metrics(module: LightningModule, watched_metrics: Iterable[WatchedMetric], pipeline: Pipeline) -> None:
    """Raise for a metric that counts what a pipeline does otherwise, or that lies where no loss is.

    Raises:
        TypeError: a metric is one that a pipeline cannot fill as one process does.
        ValueError: a metric lies on another stage than the last.
    """
    for name, part in module.named_modules():
        if isinstance(part, (Running, MetricTracker)):
            why = "counts updates" if isinstance(part, Running) else "makes new metrics as the run goes"
            raise TypeError(
                f"`{name}` is a {type(part).__name__}, which {why}: a pipeline, which runs a step once a"
                " micro-batch, cannot fill it as one process does. Use a plain metric that is reset every epoch."
            )
    last = pipeline.num_stages - 1
    units = [unit for unit in pipeline.cut.layout.units if unit.stage != last]
    for watched in watched_metrics:
        for unit in units:
            if f"{watched.name}.".startswith(f"{unit.name}."):
                raise ValueError(
                    f"Metric `{watched.name}` lies on stage {unit.stage}, in module `{unit.name}`, but metrics are"
                    f" filled where the loss is, on stage {last}. Make it an attribute of the LightningModule and"
                    " update it in the step."
                )


def metrics_of(module: LightningModule) -> list[tuple[str, Metric]]:
    """The metrics of a module, by name."""
    return [(name, metric) for name, metric in module.named_modules() if isinstance(metric, Metric)]
