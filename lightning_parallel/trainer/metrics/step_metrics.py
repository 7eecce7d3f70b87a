"""The module's torchmetrics objects in a pipeline: filled on the loss stage, read alike on every rank.

The one idea: only the loss stage runs steps to their end, so its metric objects see every micro-batch and those of the
other ranks see none. Outside a step `compute` is therefore answered by the loss stage: it computes and tells the value,
and whoever else computes hears it (``broadcast_values.py``).

Left out: metrics that count updates rather than rows (`Running`), or are made as the run goes (`MetricTracker`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import MeanMetric, Metric, MetricCollection

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.phantom import Phantom, phantoms_in
from lightning_parallel.pipeline.runtime.assembly import Pipeline
from lightning_parallel.trainer.metrics.broadcast_values import BroadcastValues
from lightning_parallel.trainer.metrics.logged_metrics import LoggedMetrics, OfOneMicrobatch
from lightning_parallel.trainer.metrics.refusals import metrics_of, refuse_metrics
from lightning_parallel.trainer.metrics.replay import MetricReplay, MetricUpdate, state_of
from lightning_parallel.trainer.metrics.watched_metric import WatchedMetric

_LIGHTNING_READS = _ResultMetric.compute.__code__  # Lightning's own reading of a logged metric; it keeps the result


class StepMetrics:
    """The metrics of a module for the length of a run.

    Args:
        module: its metrics are watched until `release`.
        pipeline: what tells and hears.

    Attributes:
        num_steps: steps run so far, of all kinds.
        logged: those of them that steps log.
        in_step: whether a step runs.
        share: weight of the micro-batch that runs, None where it is the whole batch.
        replay: the updates of a step, where steps end here and on other ranks.

    Raises:
        TypeError: a metric is one that a pipeline cannot fill as one process does.
        ValueError: a metric lies on another stage than the last.
    """

    def __init__(self, module: LightningModule, pipeline: Pipeline) -> None:
        self.module, self.pipeline = module, pipeline
        self.at_loss, self.ends_steps = pipeline.at_loss, pipeline.ends_steps
        self.num_steps, self.in_step = 0, False
        self.share: float | Tensor | None = None
        self._busy = self._warned = False
        self._undo: dict[WatchedMetric, dict[str, Any]] | None = None
        self._told = BroadcastValues(pipeline)
        self._watched = {id(metric): self._watch(name, metric) for name, metric in metrics_of(module)}
        self.logged = LoggedMetrics(module, self._watched)
        refuse_metrics(module, self._watched.values(), pipeline)
        for watched in self._watched.values():
            watched.put_on(pipeline.data.size > 1, pipeline.data.group)
        collections = [m for m in module.modules() if isinstance(m, MetricCollection)]
        several = pipeline.both_ways and pipeline.ends_steps
        self.replay = MetricReplay(collections) if several else None
        for collection in collections:
            members = [self._watched[id(member)] for member in collection.values(copy_state=False)]
            for member in members:
                member.leader = members[0]

    def release(self, failed: bool) -> None:
        """Make the metrics ordinary again; nothing told stays on its way."""
        if self._watched and self.pipeline.num_ranks > 1 and not failed:
            if self.at_loss:
                self.pipeline.tell(None)
            else:
                self.hear()
        for watched in self._watched.values():
            watched.take_off()
            if not failed:  # after a failure the device may never answer
                _move(watched.metric, torch.device("cpu"))
        self._watched.clear()

    def hear(self) -> Any:
        """What the loss stage tells of a step; values of metrics that nobody here asked for are passed over."""
        return self._told.hear_other()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step's micro-batches: metrics are filled, and computed by whoever computes."""
        self.num_steps += 1
        self._told.forget()
        self.logged.begin()
        self.in_step = True
        if self.replay is not None:
            self.replay.begin()
        try:
            yield
        finally:
            self.in_step = False
            if self.replay is not None:
                self.replay.end()
            for watched in self._watched.values():
                if watched.arguments is not None:
                    vars(watched.metric)["_forward_cache"], watched.arguments = OfOneMicrobatch(), None

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Around a run of the step that is cut before its loss, on the rank of the loss: what it updates is undone."""
        before, self._undo = self._undo, {}
        try:
            yield
        finally:
            for watched, state in self._undo.items():
                vars(watched.metric).update(state)
            self._undo = before

    def take(self, updates: Sequence[MetricUpdate]) -> None:
        """On the rank of the loss: what other ranks' micro-batches updated, see `MetricReplay`."""
        assert self.replay is not None
        self.replay.run(updates, {watched.name: watched for watched in self._watched.values()})

    def resets(self, watched: WatchedMetric) -> None:
        """A metric is going to be reset.

        Raises:
            ValueError: the step itself resets it, and steps end on several ranks.
        """
        if not self.in_step:
            watched.resets += 1
            return
        self._keep(watched)
        if self.replay is not None and self._undo is None:
            self.replay.refuse_reset(watched.name)

    def _keep(self, watched: WatchedMetric) -> None:
        """Remember what a metric is before it changes, as long as that may be undone."""
        if self._undo is not None and watched not in self._undo:
            self._undo[watched] = state_of(watched.metric)
        if self.replay is not None:
            self.replay.keep(watched)

    # -- what a metric's own methods became ----------------------------------------------------------------------------

    def passed_by(self, watched: WatchedMetric, args: Any, kwargs: Any) -> Phantom | None:
        """For a metric that takes, between calls of the model, what only later stages know: its value to all others.

        Raises:
            PhantomError: the metric is one of a collection, which joins those with equal states.
        """
        run = self.pipeline.cut.active if self.in_step else None
        if run is None or run.is_last or not (phantoms_in(args) or phantoms_in(kwargs)):
            return None
        if watched.leader is not None:
            raise PhantomError(
                f"Metric `{watched.name}` of a collection is updated between calls of the model, of which a stage makes"
                " all before later stages run: update it behind the last call."
            )
        return Phantom(torch.empty((), device="meta"), self.pipeline.device, f"the value of metric `{watched.name}`")

    def update(self, watched: WatchedMetric, *args: Any, **kwargs: Any) -> None:
        """`metric.update`, which `metric.forward` calls too."""
        if self.passed_by(watched, args, kwargs) is not None:
            return
        metric = watched.metric
        self._keep(watched)
        if not self.in_step:
            watched.updates += 1
        elif phantoms_in(args) or phantoms_in(kwargs):
            run = self.pipeline.cut.active
            args, kwargs = (args, kwargs) if run is None else run.realized((args, kwargs))
            for phantom in phantoms_in((args, kwargs)):
                raise PhantomError(
                    f"Metric `{watched.name}` is updated with a value computed from {phantom.origin}, which the loss"
                    " stage does not hold. Update metrics with values computed from the last block's output."
                )
        if self.in_step and self.share is not None:
            if isinstance(metric, MeanMetric) and _is_one_number(*args, **kwargs):
                args, kwargs = (
                    args[:1],
                    {**kwargs, "weight": self.share},
                )  # a mean over the micro-batch counts by its share
            of_batch = not metric._should_unsync  # inside a forward, the update of the batch alone
            if self.ends_steps and self._undo is None and of_batch:
                watched.arguments = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        if self.replay is None:
            watched.before["update"](*args, **kwargs)
        else:
            self.replay.update(watched, self._undo is None, args, kwargs)

    def compute(self, watched: WatchedMetric, *args: Any, **kwargs: Any) -> Any:
        """`metric.compute`: local inside a step and inside a forward, otherwise the loss stage's."""
        if self.in_step or self._busy or not watched.metric._should_unsync:
            self._warn_of_part(watched)
            return watched.before["compute"](*args, **kwargs)
        by_lightning = sys._getframe(1).f_code is _LIGHTNING_READS
        if not self.at_loss:
            return self._told.hear(watched, by_lightning, self.num_steps)
        self._busy = True  # a wrapper computes what it wraps
        try:
            value = watched.before["compute"](*args, **kwargs)
        finally:
            self._busy = False
        self._told.tell(watched, by_lightning, value)
        return value

    def _warn_of_part(self, watched: WatchedMetric) -> None:
        partly = self.in_step and self.share is not None and self.at_loss
        if partly and not self._warned and not watched.inner and watched.metric._should_unsync:
            self._warned = True
            warnings.warn(
                f"Metric `{watched.name}` is computed inside the step, where it has seen the micro-batches so far. Log"
                " the metric object, self.log(name, metric), or compute it in a hook outside the step.",
                stacklevel=4,
            )

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _watch(self, name: str, metric: Metric) -> WatchedMetric:
        _move(metric, self.pipeline.device)
        above = (self.module.get_submodule(name[:i]) for i, letter in enumerate(name) if letter == ".")
        return WatchedMetric(metric, name, any(isinstance(module, Metric) for module in above), self)


def _is_one_number(value: Any, weight: Any = None) -> bool:
    """Whether an update of a `MeanMetric` gives one value and no weight."""
    return weight is None and getattr(value, "ndim", 0) == 0


def _move(metric: Metric, device: torch.device) -> None:
    if next(metric.parameters(), None) is None:  # a metric with a network in it is moved as the unit it is
        metric.to(device)
