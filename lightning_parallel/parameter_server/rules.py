"""What all processes of a job agree on before they start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_parallel.parameter_server.consistency import SSP, Consistency
from lightning_parallel.parameter_server.filters import Float32, Precision
from lightning_parallel.parameter_server.layout import Layout
from lightning_parallel.parameter_server.updates import SGD, Update


@dataclass(frozen=True)
class Rules:
    """The agreement of a job: the table, what a push does, how stale a read may be, and every time limit.

    Args:
        layout: the flat table and its ranges.
        update: what a push does to a range.
        consistency: how stale a read may be.
        scale: ``"mean"`` divides every push by the number of active workers (under BSP: the sum of a clock's pushes by
            the number of workers that made them), so that n workers have the learning rate of one; ``"sum"`` does not.
        one_version: a pull of several ranges holds the same pushes in all of them.
        pull_precision: number format of the weights that readers get.
        replicas: servers that hold a range, if there are so many.
        aggregate: pushes that are combined into one update and one message down the chain.
        flush_after: seconds after which a smaller number is, too.
        window: pushes that a worker may have under way to a range before it waits.
        lease: seconds of silence after which a process counts as gone.
        resend_after: seconds after which a message without an answer is sent again.
        hold_for: seconds that a range is held for one reader at most.
        backup_after: a portion of a batch is given to a second worker once it has been out so many times as long as the
            slowest of those that are done took; 0 as soon as somebody is idle.

    Raises:
        ValueError: a number is below 1, a time not above 0, or ``scale`` is neither word.

    Example:
        >>> Rules(Layout(10, 2), consistency=SSP(3)).consistency.need(5)
        2
    """

    layout: Layout
    update: Update = field(default_factory=SGD)
    consistency: Consistency = field(default_factory=SSP)
    scale: Literal["mean", "sum"] = "mean"
    one_version: bool = True
    pull_precision: Precision = field(default_factory=Float32)
    replicas: int = 3
    aggregate: int = 1
    flush_after: float = 1e-3
    window: int = 8
    lease: float = 10.0
    resend_after: float = 2.0
    hold_for: float = 5.0
    backup_after: float = 0.0

    def __post_init__(self) -> None:
        for name in ("replicas", "aggregate", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"Rules got {name}={getattr(self, name)}. Use 1 or more.")
        for name in ("flush_after", "lease", "resend_after", "hold_for"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Rules got {name}={getattr(self, name)}. Use seconds above 0.")
        if self.backup_after < 0:
            raise ValueError(f"Rules got backup_after={self.backup_after}. Use 0 or more.")
        if self.scale not in ("mean", "sum"):
            raise ValueError(f"Rules got scale={self.scale!r}. Use 'mean' or 'sum'.")

    @property
    def heartbeat(self) -> float:
        """Seconds between two signs of life: five may be lost before a lease ends."""
        return self.lease / 6

    @property
    def most_under_way(self) -> int:
        """Messages that one worker and the servers may have under way to a process: of every range the pushes of a
        window, and a few questions and answers."""
        return self.layout.num_ranges * (self.window + 8)
