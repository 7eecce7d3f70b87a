"""A worker's side: the state machine that pushes, pulls, and sends again what may be lost.

The one idea: at most one pull is under way, and it survives any change of view by starting over. Pushes are the
business of ``pushing.py``; where a range lies on one server, a pull travels with the push before it. Left out:
gradients, sockets, waiting (a transport calls ``handle`` until ``result`` is there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.filters import Filters
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.chain import MANAGER
from lightning_parallel.parameter_server.trust import for_worker, of_manager
from lightning_parallel.parameter_server.worker.pushing import Pushing, joined
from lightning_parallel.parameter_server.worker.reading import Reading, Result, Shown


class Client(Pushing):
    """The state machine of one worker.

    Args:
        address: how others name it; new for every start.
        name: of the worker; one that comes with a name that is there takes its place.
        rules: the job's agreement.
        token: proof that it belongs to the job.
        endpoint: where a transport finds it.
        filters: what pushes go through before they are sent.
        look: shows all ranges of a view as their tails have them, without a message, where it can.
    """

    def __init__(
        self,
        address: str,
        name: str,
        rules: Rules,
        token: str = "",
        endpoint: str = "",
        filters: Filters | None = None,
        look: Callable[[m.View, float], Shown | None] = lambda view, now: None,
    ) -> None:
        super().__init__(address, rules, filters)
        self.look = look
        self.name, self.token, self.endpoint = name, token, endpoint
        self.reading: Reading | None = None
        self.result: Result | None = None
        self.lost = False  # the lease ended: nothing that is pushed counts any more
        self.leaving = False
        self.memory: Callable[[int], Tensor] = torch.empty  # where weights are received
        self.blocked = 0  # pulls that had to be asked more than once for one version
        self.looked = 0  # pulls that were answered by a look
        self._behind: set[int] = set()  # ranges that let this worker in at an earlier clock than others
        self._cache: dict[int, m.Rows] = {}
        self._requests = 0
        self._lease_at = 0.0

    def start(self, now: float) -> list[m.Message]:
        """What a worker says first."""
        self._lease_at = now + self.rules.heartbeat
        self._send(MANAGER, m.Hello("worker", self.name, self.token, self.endpoint))
        return self._flush()

    def pull(self, now: float) -> list[m.Message]:
        """Ask for all ranges as fresh as the rules want them; ``result`` has them once they are there."""
        self.result = None
        if not self._looks(now):
            self._asks(now)
        return self._flush()

    def _asks(self, now: float) -> None:
        self.result, self._resend_at = None, now + self.rules.resend_after
        self._begin()

    def push_pull(
        self, vector: Tensor | None, now: float, tick: bool = True, lr: float | None = None, copy: bool = True
    ) -> list[m.Message]:
        """A push and the pull after it; of a range on one server, both in one message."""
        pushes = self.push(vector, now, tick, lr, copy)
        self._asks(now)
        return joined([*pushes, *self._flush()])

    def leave(self) -> list[m.Message]:
        """Go, in order: nobody waits for this worker any more."""
        self.leaving = True
        self._send(MANAGER, m.Leave())
        return self._flush()

    def handle(self, message: m.Message, now: float) -> list[m.Message]:
        """React to a message; see ``Server.handle``."""
        body = message.body
        if not of_manager(message):
            self.foreign += 1
        elif isinstance(body, m.View):
            self._adopt(body, now)
        elif isinstance(body, m.Refused):
            self.lost = True
        elif isinstance(body, m.Wake):
            self._wake(now)
        elif isinstance(body, m.Ack):
            self._acked(body.key, body.seq, now)
        elif message.view == self.view.number:
            self._react(message.source, body, now)
        return self._flush()

    def place(self, message: m.Message) -> Tensor | None:
        """Where the weights of an answer that is on its way belong: in the vector that the pull returns."""
        rows, reading = message.body, self.reading
        if not isinstance(rows, m.Rows) or reading is None or message.view != self.view.number:
            return None
        return reading.place(rows, self.rules.layout)

    @property
    def wake_at(self) -> float | None:
        """When ``Wake`` is due next; never once the manager has let this worker go."""
        if self.lost:
            return None
        waiting = self.reading is not None or not self.is_settled
        return min(self._lease_at, self._resend_at) if waiting else self._lease_at

    def _react(self, source: str, body: m.Body, now: float) -> None:
        if not isinstance(body, (m.Rows, m.Held, m.Nack)):
            return
        if not for_worker(source, body, self.view, self.rules.layout, self.worker):
            self.foreign += 1
        elif isinstance(body, m.Rows):
            self._rows(body, now)
        elif isinstance(body, m.Held) and self.reading is not None:
            self._ask(self.reading.on_held(body))
        elif isinstance(body, m.Nack):
            self._nack(body)

    def _rows(self, rows: m.Rows, now: float) -> None:
        assert self.worker is not None
        reading = self.reading
        answers = reading is not None and rows.request == reading.request
        if answers and (rows.minimum < reading.need or self.worker not in rows.clocks):  # type: ignore[union-attr]
            self.foreign += 1
            return
        self._acked(rows.key, rows.seqs.get(self.worker, 0), now)  # what a tail answers is with all replicas
        if self.clock is not None and rows.clocks.get(self.worker, 0) >= self.clock:
            self._behind.discard(rows.key)
        if rows.request == -1:
            self._cache[rows.key] = rows
        elif self.reading is not None and rows.request == self.reading.request:
            self._resend_at = now + self.rules.resend_after
            if self.reading.on_rows(rows):
                self._finish()

    def _finish(self) -> None:
        reading = self.reading
        assert reading is not None and self.worker is not None
        if self.clock is None:
            clocks = {key: rows.clocks[self.worker] for key, rows in reading.rows.items()}
            self.clock = max(clocks.values())
            self._behind = {key for key, clock in clocks.items() if clock < self.clock}
            if self._behind:
                self._begin()  # the ranges have to hear of it first
                return
        if not reading.agrees(self.rules.one_version):
            self.blocked += 1
            self._ask(reading.again(self._request()))
            return
        self.result, self.reading = reading.result(self.rules.layout), None
        assert self.result.minimum >= reading.need, "a server answered too early"
        for key, rows in reading.rows.items():
            self._others[key] = sum(rows.seqs.values()) - rows.seqs.get(self.worker, 0)

    def _begin(self) -> None:
        """Ask the tails."""
        if self.worker is None or self.worker not in self.view.workers:
            return  # the view is awaited
        self.reading = self._question()
        if not self._takes(self._cache):
            self._ask(self.reading.questions())

    def _question(self) -> Reading:
        assert self.worker is not None
        consistency = self.rules.consistency
        need = 0 if self.clock is None else consistency.need(self.clock)
        own = self.seq if consistency.own and self.clock is not None else 0
        return Reading(self.worker, self._request(), self.keys, need, own, self.memory)

    def _looks(self, now: float) -> bool:
        """Take what the tails show, where they would answer just that."""
        if self.clock is None or self.worker not in self.view.workers:
            return False
        shown = self.look(self.view, now)
        if shown is None:
            return False
        self.reading = self._question()
        self.reading.vector, rows = shown
        self.reading.slices = {key: row.values for key, row in rows.items()}  # type: ignore[misc]
        took = self._takes(rows)
        self.looked += took
        return took

    def _ask(self, questions: Iterable[tuple[int, m.Body]]) -> None:
        if self.seq == 0 and self.clock is not None and self.worker is not None:
            for key in sorted(self._behind):
                self._to_head(key, m.Begin(key, self.worker, self.clock))
        for key, question in questions:
            place = -1 if isinstance(question, m.Pull) else 0
            self._send(self.view.chains[key][place], question)

    def _takes(self, rows: dict[int, m.Rows]) -> bool:
        """Take what was not asked for, if it is fresh enough and of one version."""
        reading = self.reading
        assert reading is not None
        if len(rows) < len(self.keys) or not all(map(reading.suits, rows.values())):
            return False
        reading.rows = dict(rows)
        if not reading.agrees(self.rules.one_version):
            reading.rows = {}
            return False
        self._finish()
        return True

    def _adopt(self, view: m.View, now: float) -> None:
        if view.number <= self.view.number:
            return
        if view.chains.keys() != self.unacked.keys() or not all(view.chains.values()):
            self.foreign += 1
            return
        self.view = view
        self.worker = next((w for w, address in view.workers.items() if address == self.address), self.worker)
        self.replay()
        self._resend_at = now + self.rules.resend_after
        if self.reading is not None or (self.result is None and self.worker in view.workers):
            self._begin()

    def _wake(self, now: float) -> None:
        if now >= self._lease_at and not self.lost:
            self._lease_at = now + self.rules.heartbeat
            hello = m.Hello("worker", self.name, self.token, self.endpoint)
            self._send(MANAGER, m.Leave() if self.leaving else m.Lease() if self.view.number else hello)
        if now >= self._resend_at:
            self._resend_at = now + self.rules.resend_after
            self.replay()
            if self.reading is not None:
                self._ask(self.reading.questions())

    def _nack(self, nack: m.Nack) -> None:
        if nack.reason in ("gap", "keys"):
            self._refused(nack)
        elif nack.reason == "retired":
            self.lost = True
        elif self.reading is not None and nack.seq == self.reading.request:
            for key in self.keys:
                self._to_head(key, m.At(key, self.reading.worker, -1, {}))
            self._begin()

    def _request(self) -> int:
        self._requests += 1
        return self._requests
