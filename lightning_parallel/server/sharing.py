"""The manager's portions: a batch handed out to idle workers, each portion's result counted once.

The one idea: whoever says that it is idle gets a portion, and gets the same one again if it asks again; at the end what
is still outstanding is handed out a second time, and a worker that is gone leaves its portion to the next. Nothing here
is lost for good: the coordinator names its batch until it is done, workers say that they are idle until they have work.
Left out: results, which go to the ranges (each range adds a portion once, see ``history.py``).

Source:
    Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.2 (Sandblaster).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_parallel.server.messages import Batch, Counted, Done, Finished, Idle, Portion
from lightning_parallel.server.portions import Portions

Send = Callable[[str, Any], None]


class Sharing:
    """The portions of the batch in hand.

    Args:
        send: takes (address, body) of what is to be sent.
    """

    def __init__(self, send: Send) -> None:
        self.send = send
        self.batch, self.value = 0, 0.0
        self.portions: Portions | None = None
        self.duplicated = 0  # portions that were handed out again while another had them, in all batches
        self._coordinator = ""
        self._at: dict[str, int] = {}  # worker -> the portion that it has
        self._idle: dict[str, None] = {}  # workers without one, in the order in which they said so
        self._values: dict[int, tuple[str, float]] = {}  # portion -> who was first, and with what

    def handle(self, source: str, body: Batch | Idle | Finished) -> None:
        """React to a coordinator or a worker."""
        if isinstance(body, Batch):
            self._begin(source, body)
        elif isinstance(body, Idle):
            self._idle[source] = None
            self._hand_out()
        else:
            self._finish(source, body)

    def leave(self, worker: str) -> None:
        """A worker is gone: what only it had is handed out again."""
        self._idle.pop(worker, None)
        self._at.pop(worker, None)
        if self.portions is not None:
            self.portions.leave(worker)
        self._hand_out()

    def _begin(self, coordinator: str, batch: Batch) -> None:
        self._coordinator = coordinator
        if batch.batch > self.batch and batch.count > 0:
            self.batch, self.portions = batch.batch, Portions(batch.count)
            self._at, self._values = {}, {}
            self._hand_out()
        self._tell_done()

    def _hand_out(self) -> None:
        portions = self.portions
        if portions is None or portions.is_done:
            return
        for worker in list(self._idle):
            before = portions.duplicated
            portion = self._at[worker] if worker in self._at else portions.next(worker)
            self.duplicated += portions.duplicated - before
            if portion is not None:
                del self._idle[worker]
                self._at[worker] = portion
                self.send(worker, Portion(self.batch, portion))

    def _finish(self, worker: str, finished: Finished) -> None:
        batch, portion = finished.batch, finished.portion
        if batch == self.batch and self._at.get(worker) == portion:
            del self._at[worker]
        if batch == self.batch and self.portions is not None and self.portions.finish(portion, worker):
            self._values[portion] = (worker, finished.value)
            self._tell_done()
        first = batch == self.batch and self._values.get(portion, ("",))[0] == worker
        self.send(worker, Counted(batch, portion, int(first)))

    def _tell_done(self) -> None:
        if self.portions is not None and self.portions.is_done:
            total = sum(self._values[portion][1] for portion in sorted(self._values))
            self.send(self._coordinator, Done(self.batch, total))
