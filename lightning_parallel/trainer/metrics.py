"""The module's torchmetrics objects in a pipeline: filled on the loss stage, read alike on every rank.

The one idea: only the loss stage runs steps to their end, so its metric objects see every micro-batch and those of the
other ranks see none. Outside a step `compute` is therefore answered by the loss stage: it computes and tells the value,
and whoever else computes hears it. A told value carries the moment it holds for (steps run, resets, updates), so that
one which only rank 0 asked for makes nobody wait and is passed over by the others.

What `self.log(name, metric, on_step=True)` shows is the value of the whole batch, which no micro-batch's forward knows:
a blank copy of the metric takes what each forward took, and is computed after the last one. Left out: metrics that
count updates rather than rows (`Running`), or are made as the run goes (`MetricTracker`).
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker, Running

from lightning_parallel.pipeline.assembly import Pipeline
from lightning_parallel.pipeline.phantom import Phantom, PhantomError, phantoms_in
from lightning_parallel.trainer.metric_replay import MetricReplay, Update, state_of

_REPLACED = ("update", "compute", "distributed_available_fn", "process_group")
_LIGHTNING_READS = _ResultMetric.compute.__code__  # Lightning's own reading of a logged metric; it keeps the result


@dataclass(frozen=True)
class _Told:
    """A metric's value and the moment it holds for: steps run, then resets and updates outside steps."""

    key: tuple[str, bool]
    moment: tuple[int, int]
    value: Any


class _OfOneMicrobatch:
    """Stands where torchmetrics keeps the last forward's value; Lightning shows it when asked to log it."""

    def __repr__(self) -> str:
        return (
            "the value of one micro-batch. A pipeline knows a whole batch's value of metrics that the step itself logs:"
            " call self.log(name, metric) in the step, or with on_step=False"
        )


@dataclass(frozen=True)
class Given:
    """What a metric that is logged on_step took in a micro-batch; of a whole batch `value`, what its forward gave."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    value: Any = None
    is_whole: bool = False


@dataclass(eq=False)
class _Watched:
    """A metric and what it was before; `leader`: whose updates count (a collection may update one metric of many)."""

    metric: Metric
    name: str
    inner: bool
    owner: StepMetrics
    leader: _Watched | None = None
    resets: int = 0
    updates: int = 0
    arguments: tuple[Any, Any] | None = None  # what the last forward of this step took
    before: dict[str, Any] = field(default_factory=dict)

    def put_on(self) -> None:
        metric, cls = self.metric, type(self.metric)
        self.before = {key: vars(metric)[key] for key in _REPLACED}
        metric.__class__ = type(cls.__name__, (_Reports, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        vars(metric).update(
            _watched=self,
            update=partial(self.owner.update, self),
            compute=partial(self.owner.compute, self),
            distributed_available_fn=partial(bool, self.owner.pipeline.data.size > 1),
            process_group=self.owner.pipeline.data.group,
        )

    def take_off(self) -> None:
        self.metric.__class__ = type(self.metric).__mro__[2]
        vars(self.metric).update(self.before)
        del self.metric.__dict__["_watched"]

    @property
    def moment(self) -> tuple[int, int]:
        return self.owner.num_steps, self.resets + (self.leader or self).updates


class _Reports:
    """Added to a watched metric's class.

    Resets are counted, a run of an earlier stage passes by what it lacks, a copy (or a pickle) is an ordinary metric.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        watched: _Watched = vars(self)["_watched"]
        passed_by = watched.owner.passed_by(watched, args, kwargs)
        return super().forward(*args, **kwargs) if passed_by is None else passed_by  # type: ignore[misc]

    def reset(self) -> None:
        watched: _Watched = vars(self)["_watched"]
        watched.owner.resets(watched)
        super().reset()  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in self.__getstate__().items() if key != "_watched"}  # type: ignore[attr-defined]
        return _ordinary, (type(self).__mro__[2],), state


class StepMetrics:
    """The metrics of a module for the length of a run.

    Args:
        module: its metrics are watched until `release`.
        pipeline: what tells and hears.

    Attributes:
        num_steps: steps run so far, of all kinds.
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
        self._undo: dict[_Watched, dict[str, Any]] | None = None
        self._told: dict[tuple[str, bool], list[_Told]] = {}
        self._blanks: dict[Hashable, Any] = {}
        self._watched = {id(metric): self._watch(name, metric) for name, metric in _metrics(module)}
        self._refuse()
        for watched in self._watched.values():
            watched.put_on()
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
        told = self.pipeline.hear()
        while isinstance(told, _Told):
            told = self.pipeline.hear()
        return told

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step's micro-batches: metrics are filled, and computed by whoever computes."""
        self.num_steps += 1
        self._told.clear()
        self._blanks.clear()
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
                    vars(watched.metric)["_forward_cache"], watched.arguments = _OfOneMicrobatch(), None

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

    def take(self, updates: Sequence[Update]) -> None:
        """On the rank of the loss: what other ranks' micro-batches updated, see `MetricReplay`."""
        assert self.replay is not None
        self.replay.run(updates, {watched.name: watched for watched in self._watched.values()})

    def resets(self, watched: _Watched) -> None:
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

    def _keep(self, watched: _Watched) -> None:
        """Remember what a metric is before it changes, as long as that may be undone."""
        if self._undo is not None and watched not in self._undo:
            self._undo[watched] = state_of(watched.metric)
        if self.replay is not None:
            self.replay.keep(watched)

    # -- what a metric's own methods became ----------------------------------------------------------------------------

    def passed_by(self, watched: _Watched, args: Any, kwargs: Any) -> Phantom | None:
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

    def update(self, watched: _Watched, *args: Any, **kwargs: Any) -> None:
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

    def compute(self, watched: _Watched, *args: Any, **kwargs: Any) -> Any:
        """`metric.compute`: local inside a step and inside a forward, otherwise the loss stage's."""
        if self.in_step or self._busy or not watched.metric._should_unsync:
            self._warn_of_part(watched)
            return watched.before["compute"](*args, **kwargs)
        key = (watched.name, sys._getframe(1).f_code is _LIGHTNING_READS)
        if not self.at_loss:
            return tree_map_only(Tensor, lambda t: t.to(watched.metric.device), self._hear_value(watched, key))
        self._busy = True  # a wrapper computes what it wraps
        try:
            value = watched.before["compute"](*args, **kwargs)
        finally:
            self._busy = False
        self.pipeline.tell(_Told(key, watched.moment, tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), value)))
        return value

    def _hear_value(self, watched: _Watched, key: tuple[str, bool]) -> Any:
        """The value that the loss stage told for this moment.

        What Lightning reads it reads once on every rank, though on rank 0 maybe earlier, for the progress bar: one
        message a reading. What the user computes holds as long as nobody steps, updates or resets.
        """
        by_lightning = key[1]
        wanted = (self.num_steps, 0) if by_lightning else watched.moment
        while True:
            known = self._told.setdefault(key, [])
            while known and known[0].moment < wanted:
                known.pop(0)
            if known:
                return (known.pop(0) if by_lightning else known[0]).value
            told = self.pipeline.hear(f"metric `{watched.name}`, which rank 0 must compute too")
            if not isinstance(told, _Told):
                raise RuntimeError(
                    f"Rank {self.pipeline.rank} computes metric `{watched.name}`, which rank 0 did not compute. Only"
                    " rank 0 (the last stage) holds what a metric has seen: compute it on every rank."
                )
            self._told.setdefault(told.key, []).append(told)

    def _warn_of_part(self, watched: _Watched) -> None:
        partly = self.in_step and self.share is not None and self.at_loss
        if partly and not self._warned and not watched.inner and watched.metric._should_unsync:
            self._warned = True
            warnings.warn(
                f"Metric `{watched.name}` is computed inside the step, where it has seen the micro-batches so far. Log"
                " the metric object, self.log(name, metric), or compute it in a hook outside the step.",
                stacklevel=4,
            )

    # -- metrics as logged values --------------------------------------------------------------------------------------

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

    def given(self, metric: Metric) -> Given:
        """What a metric that the step logs on_step took in its last forward.

        Raises:
            TypeError: the metric has a forward of its own, whose arguments are not known.
        """
        watched = self._watched[id(metric)]
        if self.share is None or metric._forward_cache is None:
            return Given(value=metric._forward_cache, is_whole=True)
        if watched.arguments is None:
            raise TypeError(
                f"Metric `{watched.name}` is logged on_step, but {type(metric).__name__} has a forward of its own, from"
                " which a pipeline cannot tell the value of a whole batch. Log it with on_step=False, on_epoch=True."
            )
        return Given(*watched.arguments)

    def add(self, key: Hashable, name: str, given: Given) -> None:
        """Keep in mind the value of a whole batch for a logged key, or add a micro-batch to it."""
        if given.is_whole:
            self._blanks[key] = given.value
            return
        if self._blanks.get(key) is None:
            metric = self.module.get_submodule(name)
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
        metric = self.module.get_submodule(name)
        assert isinstance(metric, Metric)
        if value is not None:
            vars(metric)["_forward_cache"] = value
        return metric

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _watch(self, name: str, metric: Metric) -> _Watched:
        _move(metric, self.pipeline.device)
        above = (self.module.get_submodule(name[:i]) for i, letter in enumerate(name) if letter == ".")
        return _Watched(metric, name, any(isinstance(module, Metric) for module in above), self)

    def _refuse(self) -> None:
        for name, module in self.module.named_modules():
            if isinstance(module, (Running, MetricTracker)):
                why = "counts updates" if isinstance(module, Running) else "makes new metrics as the run goes"
                raise TypeError(
                    f"`{name}` is a {type(module).__name__}, which {why}: a pipeline, which runs a step once a"
                    " micro-batch, cannot fill it as one process does. Use a plain metric that is reset every epoch."
                )
        last = self.pipeline.num_stages - 1
        units = [unit for unit in self.pipeline.cut.layout.units if unit.stage != last]
        for watched in self._watched.values():
            for unit in units:
                if f"{watched.name}.".startswith(f"{unit.name}."):
                    raise ValueError(
                        f"Metric `{watched.name}` lies on stage {unit.stage}, in module `{unit.name}`, but metrics are"
                        f" filled where the loss is, on stage {last}. Make it an attribute of the LightningModule and"
                        " update it in the step."
                    )


def _metrics(module: LightningModule) -> list[tuple[str, Metric]]:
    return [(name, metric) for name, metric in module.named_modules() if isinstance(metric, Metric)]


def _ordinary(cls: type[Metric]) -> Metric:
    return cls.__new__(cls)


def _is_one_number(value: Any, weight: Any = None) -> bool:
    """Whether an update of a `MeanMetric` gives one value and no weight."""
    return weight is None and getattr(value, "ndim", 0) == 0


def _move(metric: Metric, device: torch.device) -> None:
    if next(metric.parameters(), None) is None:  # a metric with a network in it is moved as the unit it is
        metric.to(device)


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
