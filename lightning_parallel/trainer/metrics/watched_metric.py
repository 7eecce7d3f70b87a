"""A torchmetrics object of a module under a strategy that fills it itself: what becomes of its methods, for a while.

The one idea: the object stays the user's own, with its state; only `update`, `compute` and what says who else has one
like it are replaced, and its class is told of resets. `take_off` leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch.distributed import ProcessGroup
from torchmetrics import Metric

_REPLACED = ("update", "compute", "distributed_available_fn", "process_group")


class Owner(Protocol):
    """What updates and computes the metric instead of itself."""

    num_steps: int

    def update(self, watched: WatchedMetric, *args: Any, **kwargs: Any) -> None: ...

    def compute(self, watched: WatchedMetric, *args: Any, **kwargs: Any) -> Any: ...

    def resets(self, watched: WatchedMetric) -> None: ...

    def passed_by(self, watched: WatchedMetric, args: Any, kwargs: Any) -> Any | None: ...


@dataclass(eq=False)
class WatchedMetric:
    """A metric and what it was before; `leader`: whose updates count (a collection may update one metric of many)."""

    metric: Metric
    name: str
    inner: bool
    owner: Owner
    leader: WatchedMetric | None = None
    resets: int = 0
    updates: int = 0
    arguments: tuple[Any, Any] | None = None  # what the last forward of this step took
    before: dict[str, Any] = field(default_factory=dict)

    def put_on(self, shared: bool, group: ProcessGroup | None) -> None:
        """Replace its methods; `shared`: whether the other ranks of `group` (None: of all) hold one like it."""
        metric, cls = self.metric, type(self.metric)
        self.before = {key: vars(metric)[key] for key in _REPLACED}
        metric.__class__ = type(cls.__name__, (_Reports, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        vars(metric).update(
            _watched=self,
            update=partial(self.owner.update, self),
            compute=partial(self.owner.compute, self),
            distributed_available_fn=partial(bool, shared),
            process_group=group,
        )

    def take_off(self) -> None:
        """Make it the ordinary metric that it was."""
        self.metric.__class__ = type(self.metric).__mro__[2]
        vars(self.metric).update(self.before)
        del self.metric.__dict__["_watched"]

    @property
    def moment(self) -> tuple[int, int]:
        """What its value holds for: steps run, then resets and updates outside steps."""
        return self.owner.num_steps, self.resets + (self.leader or self).updates


class _Reports:
    """Added to a watched metric's class.

    Resets are counted, its owner may pass a forward by, and a copy (or a pickle) is an ordinary metric again.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        watched: WatchedMetric = vars(self)["_watched"]
        passed_by = watched.owner.passed_by(watched, args, kwargs)
        return super().forward(*args, **kwargs) if passed_by is None else passed_by  # type: ignore[misc]

    def reset(self) -> None:
        watched: WatchedMetric = vars(self)["_watched"]
        watched.owner.resets(watched)
        super().reset()  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in self.__getstate__().items() if key != "_watched"}  # type: ignore[attr-defined]
        return _ordinary, (type(self).__mro__[2],), state


def _ordinary(cls: type[Metric]) -> Metric:
    return cls.__new__(cls)
