"""Metrics that a step logs on_step: what `self.log(name, metric, on_step=True)` shows is the value of the whole batch.

The one idea: no micro-batch's forward knows that value, so a blank copy of the metric takes what each forward took, and
is computed after the last one.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_parallel.trainer.metrics.watched_metric import WatchedMetric


class OfOneMicrobatch:
    """Stands where torchmetrics keeps the last forward's value; Lightning shows it when asked to log it."""

    def __repr__(self) -> str:
        return (
            "the value of one micro-batch. A pipeline knows a whole batch's value of metrics that the step itself logs:"
            " call self.log(name, metric) in the step, or with on_step=False"
        )


@dataclass(frozen=True)
class LoggedValue:
    """What a metric that is logged on_step took in a micro-batch; of a whole batch `value`, what its forward gave."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    value: Any = None
    is_whole: bool = False


class LoggedMetrics:
    """The metrics of a module as values of one step after another.

    Args:
        module: has them as attributes.
        watched: by the metric's id.
    """

    def __init__(self, module: LightningModule, watched: Mapping[int, WatchedMetric]) -> None:
        self._module, self._watched = module, watched
        self._blanks: dict[Hashable, Any] = {}

    def begin(self) -> None:
        """A step begins."""
        self._blanks.clear()

    def name_of(self, metric: Any, key: str) -> str:
        """The metric's attribute, which is how it travels.

        Raises:
            TypeError: the module has no such metric.
        """
        watched = self._watched.get(id(metric))
        if watched is None:
            single = "Make it an attribute of the LightningModule in __init__, setup or configure_model."
            advice = "Use self.log_dict(collection)." if isinstance(metric, MetricCollection) else single
            raise TypeError(
                f"self.log({key!r}) got a {type(metric).__name__} that is no metric of the module. {advice}"
            )
        return watched.name

    def given(self, metric: Metric, whole: bool) -> LoggedValue:
        """What a metric that the step logs on_step took in its last forward; `whole`: of the whole batch.

        Raises:
            TypeError: the metric has a forward of its own, whose arguments are not known.
        """
        watched = self._watched[id(metric)]
        if whole or metric._forward_cache is None:
            return LoggedValue(value=metric._forward_cache, is_whole=True)
        if watched.arguments is None:
            raise TypeError(
                f"Metric `{watched.name}` is logged on_step, but {type(metric).__name__} has a forward of its own, from"
                " which a pipeline cannot tell the value of a whole batch. Log it with on_step=False, on_epoch=True."
            )
        return LoggedValue(*watched.arguments)

    def add(self, key: Hashable, name: str, given: LoggedValue) -> None:
        """Keep in mind the value of a whole batch for a logged key, or add a micro-batch to it."""
        if given.is_whole:
            self._blanks[key] = given.value
            return
        if self._blanks.get(key) is None:
            metric = self._module.get_submodule(name)
            assert isinstance(metric, Metric)
            self._blanks[key] = _blank(metric)
        self._blanks[key].update(*given.args, **given.kwargs)

    def value(self, key: Hashable, name: str) -> Tensor | None:
        """The whole batch's value of what was noted, None if nothing was.

        Raises:
            ValueError: it is not one number.
        """
        noted = self._blanks.pop(key, None)
        value = noted.compute() if isinstance(noted, Metric) else noted
        if value is not None and (not isinstance(value, Tensor) or value.numel() != 1):
            raise ValueError(
                f"Metric `{name}` is logged, but it gives {value}; a logged metric must give one number. Log its parts."
            )
        return value

    def restore(self, name: str, value: Tensor | None) -> Metric:
        """The metric of that name on this rank, as if its forward had given the whole batch's value."""
        metric = self._module.get_submodule(name)
        assert isinstance(metric, Metric)
        if value is not None:
            vars(metric)["_forward_cache"] = value
        return metric


def _blank(metric: Metric) -> Metric:
    """A metric like this one that has seen nothing. What the metric has seen is not copied, nor a network in it."""
    if any(isinstance(inner, Metric) for inner in metric.modules() if inner is not metric):
        blank = copy.deepcopy(metric)
    else:
        blank = copy.copy(metric)
        containers = {key: copy.copy(value) for key, value in vars(blank).items() if type(value) in (list, dict, set)}
        vars(blank).update(containers)
    blank.reset()
    return blank
