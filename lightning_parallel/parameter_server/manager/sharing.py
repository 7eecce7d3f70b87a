"""The manager's portions: a batch handed out to idle workers, each portion's result counted once.

The one idea: whoever says that it is idle gets a portion, and gets the same one again if it asks again; at the end what
is still outstanding is handed out a second time, and a worker that is gone leaves its portion to the next. Nothing here
is lost for good: the coordinator names its batch until it is done, workers say that they are idle until they have work,
and what is done is in the manager's log before anybody is told (``Progress``).
Left out: results, which go to the ranges (each range adds a portion once, see ``parameter_server/server/history.py``).

Source:
    Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.2 (Sandblaster).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_parallel.parameter_server.manager.portions import Portions
from lightning_parallel.parameter_server.messages import Batch, Counted, Done, Finished, Idle, Portion

Send = Callable[[str, Any], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """A batch as far as it is done: its number, its portions, who named it, portion -> who was first and with what."""

    batch: int = 0
    count: int = 0
    coordinator: str = ""
    results: dict[int, tuple[str, float]] = field(default_factory=dict)


class Sharing:
    """The portions of the batch in hand.

    Args:
        send: takes (address, body) of what is to be sent.
        progress: what a manager that is gone knew, to go on from.
        patience: see ``Portions``.

    Attributes:
        now: the time of what is handled, seconds.
    """

    def __init__(self, send: Send, progress: Progress | None = None, patience: float = 0.0) -> None:
        progress = progress or Progress()
        self.send, self.batch, self.patience, self.now = send, progress.batch, patience, 0.0
        self.portions = Portions(progress.count, progress.results, patience) if progress.count else None
        self.duplicated = 0  # portions that were handed out again while another had them, in all batches
        self._coordinator = progress.coordinator
        self._at: dict[str, int] = {}  # worker -> the portion that it has
        self._idle: dict[str, int] = {}  # workers without one, in the order in which they said so: what they prefer
        self._results = dict(progress.results)  # portion -> who was first, and with what

    @property
    def progress(self) -> Progress:
        """What is done."""
        count = 0 if self.portions is None else self.portions.count
        return Progress(self.batch, count, self._coordinator, dict(self._results))

    def handle(self, source: str, body: Batch | Idle | Finished) -> bool:
        """React to a coordinator or a worker; whether ``progress`` has changed."""
        if isinstance(body, Batch):
            return self._begin(source, body)
        if isinstance(body, Finished):
            return self._finish(source, body)
        self._idle[source] = body.prefers
        self.hand_out()
        return False

    @property
    def wake_at(self) -> float | None:
        """When a portion will be late that an idle worker could repeat."""
        is_over = self.portions is None or self.portions.is_done or not self.patience
        return None if is_over or self.portions is None else self.portions.late_at(self._idle)

    def leave(self, worker: str) -> None:
        """A worker is gone: what only it had is handed out again."""
        self._idle.pop(worker, None)
        self._at.pop(worker, None)
        if self.portions is not None:
            self.portions.leave(worker)
        self.hand_out()

    def _begin(self, coordinator: str, batch: Batch) -> bool:
        if batch.count < 1:
            self.send(coordinator, Batch(self.batch, 0))
            return False
        is_new = batch.batch > self.batch
        if is_new:
            self.batch, self._coordinator = batch.batch, coordinator
            self.portions = Portions(batch.count, patience=self.patience)
            self._at, self._results = {}, {}
            self.hand_out()
        if coordinator == self._coordinator:
            self._tell_done()
        return is_new

    def hand_out(self) -> None:
        """Give idle workers what there is for them now."""
        portions = self.portions
        if portions is None or portions.is_done:
            return
        for worker in list(self._idle):
            before = portions.duplicated
            portion = self._at[worker] if worker in self._at else portions.next(worker, self._idle[worker], self.now)
            self.duplicated += portions.duplicated - before
            if portion is not None:
                del self._idle[worker]
                self._at[worker] = portion
                self.send(worker, Portion(self.batch, portion))

    def _finish(self, worker: str, finished: Finished) -> bool:
        batch, portion = finished.batch, finished.portion
        if batch == self.batch and self._at.get(worker) == portion:
            del self._at[worker]
        is_first = batch == self.batch and self.portions is not None and self.portions.finish(portion, self.now)
        if is_first:
            self._results[portion] = (worker, finished.value)
            self._tell_done()
        was_first = batch == self.batch and self._results.get(portion, ("",))[0] == worker
        self.send(worker, Counted(batch, portion, int(was_first)))
        return is_first

    def _tell_done(self) -> None:
        if self.portions is not None and self.portions.is_done:
            total = sum(self._results[portion][1] for portion in sorted(self._results))
            self.send(self._coordinator, Done(self.batch, total))
