"""A server: the state machine around all ranges that lie on it.

The one idea: every message carries the view in which it was sent, and only messages of one's own view are acted on. An
older one is refused: its sender did not know who holds the range now. A newer one waits until the view itself has come.
Left out: sockets and clocks; ``handle`` is given what came and the time, and returns what is to be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.chain import MANAGER, NoBoard
from lightning_parallel.parameter_server.server.history import Memory, Range, is_copy
from lightning_parallel.parameter_server.server.replica import Replica
from lightning_parallel.parameter_server.trust import for_server, of_manager

EARLY = 1024  # messages of a view to come that are kept, or as many as a worker may have under way

# what becomes of a message; False if it cannot be
_ACTIONS: dict[type, Callable[[Replica, str, Any, float], bool | None]] = {
    m.Push: lambda replica, source, body, now: replica.on_push(source, body, now),
    m.Pull: lambda replica, source, body, now: replica.on_pull(body),
    m.Append: lambda replica, source, body, now: replica.on_append(source, body, now),
    m.Committed: lambda replica, source, body, now: replica.on_committed(body, now),
    m.Seed: lambda replica, source, body, now: replica.on_seed(body, now),
    m.Begin: lambda replica, source, body, now: replica.on_begin(body, now),
    m.Call: lambda replica, source, body, now: replica.on_call(source, body, now),
    m.Read: lambda replica, source, body, now: replica.on_read(source, body),
    m.Hold: lambda replica, source, body, now: replica.on_hold(body, now),
    m.At: lambda replica, source, body, now: replica.on_at(source, body, now),
    m.Drain: lambda replica, source, body, now: replica.on_drain(now),
    m.Want: lambda replica, source, body, now: replica.on_want(source, body),
}


class Server:
    """The state machine of one server.

    Args:
        address: how others name it; new for every start.
        rules: the job's agreement.
        token: proof that it belongs to the job.
        endpoint: where a transport finds it.
        ranges: what it has already, such as from its log; key -> range.
        journal: takes (key, entry) before an entry is applied.
        memory: where the weights of ranges lie that come to it.
        board: where readers of this host may look.
        host: name of the host that it is on.
    """

    def __init__(
        self,
        address: str,
        rules: Rules,
        token: str = "",
        endpoint: str = "",
        ranges: dict[int, Range] | None = None,
        journal: Callable[[int, m.Entry], None] | None = None,
        memory: Memory = torch.zeros,
        board: NoBoard | None = None,
        host: str = "",
    ) -> None:
        self.address, self.rules, self.token, self.endpoint, self.host = address, rules, token, endpoint, host
        self.view, self.journal, self.memory, self.board = m.View(), journal, memory, board or NoBoard()
        self.out: list[m.Message] = []
        self.early: deque[m.Message] = deque(maxlen=max(EARLY, rules.most_under_way))
        self.refused = 0  # messages of older views
        self.foreign = 0  # that their sender may not say, or that cannot be
        self.lost = False  # the manager took this server for gone
        self._lease_at = 0.0
        self._copying: set[int] = set()
        self.replicas = {key: self._replica(part) for key, part in (ranges or {}).items()}

    def start(self, now: float) -> list[m.Message]:
        """What a server says first."""
        self._lease_at = now + self.rules.heartbeat
        self.board.stamp(now)
        self._send(MANAGER, self._hello())
        return self._flush()

    def handle(self, message: m.Message, now: float) -> list[m.Message]:
        """React to a message.

        Args:
            message: what came.
            now: seconds, of any clock that does not go back.

        Returns:
            What is to be sent.
        """
        self._act(message, now)
        return self._flush()

    def _act(self, message: m.Message, now: float) -> None:
        if isinstance(message.body, m.Wake):
            self._wake(now)
        elif not of_manager(message):
            self.foreign += 1
        elif isinstance(message.body, m.View):
            self._adopt(message.body, now)
        elif isinstance(message.body, m.Refused):
            self.lost = True
        elif message.view > self.view.number:
            self.early.append(message)
        elif self.is_current(message):
            self._react(message, now)
        else:
            self.refused += 1

    def is_current(self, message: m.Message) -> bool:
        """Whether the sender knew who takes part now."""
        return message.view == self.view.number

    def place(self, message: m.Message) -> None:
        """What is on its way may lie anywhere."""

    @property
    def wake_at(self) -> float | None:
        """When ``Wake`` is due next."""
        if self.lost:
            return None
        due = self._lease_at
        for replica in self.replicas.values():
            at = replica.wake_at
            if at is not None and at < due:
                due = at
        return due

    def _react(self, message: m.Message, now: float) -> None:
        body, source = message.body, message.source
        if not for_server(source, body, self.address, self.view):
            self.foreign += 1
            return
        if isinstance(body, m.Copy):
            self._take_copy(source, body, now)
            return
        replica = self.replicas.get(getattr(body, "key", -1))
        if replica is None:
            return
        action = _ACTIONS.get(type(body))
        if action is not None:
            self.foreign += action(replica, source, body, now) is False

    def _adopt(self, view: m.View, now: float) -> None:
        if view.number <= self.view.number:
            return
        if not view.joining.keys() <= view.chains.keys() or not all(view.chains.values()):
            self.foreign += 1
            return
        self.view = view
        held = {key for key, chain in view.chains.items() if self.address in chain}
        copying = {key for key, server in view.joining.items() if server == self.address}
        for key in [key for key in self.replicas if key not in held]:
            self.replicas.pop(key).enter(m.View())
        for key in sorted(held - self.replicas.keys()):  # a range that nobody has yet
            part = Range(key, self.rules.layout.length(key), self.rules.update, self.memory)
            self.replicas[key] = self._replica(part)
        for key in sorted(held):
            self.replicas[key].adopt(view, now)
        self._copying = copying
        early, self.early = self.early, deque(maxlen=self.early.maxlen)
        for message in early:
            self._act(message, now)

    def _take_copy(self, source: str, copy: m.Copy, now: float) -> None:
        if not is_copy(copy, self.rules):
            self.foreign += 1
        elif copy.key in self.replicas:
            self.replicas[copy.key].on_copy(source, copy, now)
        elif copy.key in self._copying:
            replica = self.replicas[copy.key] = self._replica(Range.of(copy, self.rules.update, self.memory))
            replica.enter(self.view)
            replica.tell_copied()

    def _wake(self, now: float) -> None:
        for replica in self.replicas.values():
            replica.wake(now)
        if now >= self._lease_at and not self.lost:
            self._lease_at = now + self.rules.heartbeat
            self.board.stamp(now)
            self._send(MANAGER, m.Lease() if self.view.number else self._hello())
            self._ask_again()

    def _ask_again(self) -> None:
        """A range that is to be copied: say that it is here, or that it never came."""
        for key in sorted(self._copying):
            if key in self.replicas:
                self.replicas[key].tell_copied()
            else:
                self._send(self.view.chains[key][-1], m.Want(key, -1))

    def _hello(self) -> m.Hello:
        holds = {key: replica.part.lsn for key, replica in self.replicas.items() if replica.part.seeded}
        workers = max((worker for replica in self.replicas.values() for worker in replica.part.seqs), default=0)
        return m.Hello("server", self.address, self.token, self.endpoint, holds, workers, self.host)

    def _replica(self, part: Range) -> Replica:
        return Replica(self.address, part, self.rules, self._send, self.journal, self.board)

    def _send(self, target: str, body: Any) -> None:
        self.out.append(m.Message(self.address, target, self.view.number, body))

    def _flush(self) -> list[m.Message]:
        out, self.out = self.out, []
        return out
