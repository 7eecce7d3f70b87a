"""The manager: who takes part, under which number, and where the ranges lie.

The one idea: all that it knows is one ``View``; whoever comes, goes or falls silent makes the next one, with a number
higher by one, and everybody is told. Whoever answers under an older number is told again. What it knows is in a
log before anybody is told, so that one that is started again goes on (``roster.py``). Left out: weights, clocks,
pushes: training does not pass through here.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.manager.chain_steps import Join, Reorder, next_step, survivors
from lightning_parallel.parameter_server.manager.ring import Ring
from lightning_parallel.parameter_server.manager.roster import Member, Roster
from lightning_parallel.parameter_server.manager.sharing import Sharing
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.chain import MANAGER
from lightning_parallel.parameter_server.trust import for_manager


class RangeLostError(RuntimeError):
    """Every server of a range is gone, and its weights with them."""


class Manager:
    """The state machine of the manager.

    Args:
        rules: the job's agreement.
        num_servers: servers that must be there before the first view.
        num_workers: workers that must be there before any starts; later ones join in the run.
        token: what a ``Hello`` must carry.
        roster: what a manager that is gone knew, to go on from.
        journal: takes what this one knows, whenever that changes and before anybody is told.
    """

    def __init__(
        self,
        rules: Rules,
        num_servers: int,
        num_workers: int,
        token: str = "",
        roster: Roster | None = None,
        journal: Callable[[Roster], None] | None = None,
    ) -> None:
        self.rules, self.num_servers, self.num_workers, self.token = rules, num_servers, num_workers, token
        self.journal, self.address = journal, MANAGER
        roster = roster or Roster()
        self.view, self.members = roster.view, dict(roster.members)
        self.gone = list(roster.gone)  # addresses in the order in which they left
        self._workers = roster.workers  # numbers given out
        self._expires: dict[str, float] = {}
        self._ring: Ring | None = None  # of the servers that are there now
        self._changed = False
        self.foreign = 0  # messages that their sender may not say, or that cannot be
        self._out: list[m.Message] = []
        self.sharing = Sharing(self._send, roster.progress, rules.backup_after)

    def start(self, now: float) -> list[m.Message]:
        """Tell the members that a log has named, if any, where things stand; their leases begin."""
        self._expires = dict.fromkeys(self.members, now + self.rules.lease)
        self.sharing.now = now
        for address in self.members if self._started else ():
            self._send(address, self.view)
        self._drain(self.view.chains)
        return self._flush()

    def handle(self, message: m.Message, now: float) -> list[m.Message]:
        """React to a message; see ``Server.handle``.

        Raises:
            RangeLostError: the last server of a range is gone.
        """
        body, source = message.body, message.source
        self.sharing.now = now
        if not for_manager(source, body, self.rules.layout):
            self.foreign += 1
        elif isinstance(body, m.Hello):
            self._hello(source, body, now)
        elif isinstance(body, m.Wake):
            self._expire(now)
            self.sharing.hand_out()
        elif source not in self.members:
            self._send(source, m.Refused("unknown"))
        else:
            self._expires[source] = now + self.rules.lease
            self._member_says(message)
        return self._flush()

    def _flush(self) -> list[m.Message]:
        if self._changed and self.journal is not None:
            known = self.view, dict(self.members), tuple(self.gone), self._workers, self.sharing.progress
            self.journal(Roster(*known))
        self._changed, out, self._out = False, self._out, []
        return out

    def place(self, message: m.Message) -> None:
        """What is on its way may lie anywhere."""

    @property
    def wake_at(self) -> float | None:
        """When the next lease ends, or the next portion is late."""
        late_at = self.sharing.wake_at
        return min([*self._expires.values(), *([] if late_at is None else [late_at])], default=None)

    def alive(self, role: str) -> list[str]:
        """Addresses of the members of a role."""
        return [address for address, member in self.members.items() if member.role == role]

    def _member_says(self, message: m.Message) -> None:
        body, source = message.body, message.source
        if isinstance(body, m.Leave):
            self._remove([source])
        elif message.view < self.view.number and self._started:
            self._send(source, self.view)
        elif isinstance(body, (m.Batch, m.Idle, m.Finished)):
            self._changed |= self.sharing.handle(source, body)
        elif isinstance(body, m.Copied) and self.view.joining.get(body.key) == source:
            self._next(chains={body.key: (*self.view.chains[body.key], source)})
        elif isinstance(body, m.Drained) and self._may_reorder(source, body.key):
            self._next(chains={body.key: self._goal(body.key)})
        elif isinstance(body, m.Lease):
            self._drain([key for key in self.view.chains if self.view.chains[key][0] == source])

    def _may_reorder(self, source: str, key: int) -> bool:
        chain = self.view.chains.get(key, ())
        return chain[:1] == (source,) and isinstance(next_step(chain, self._goal(key)), Reorder)

    def _hello(self, source: str, hello: m.Hello, now: float) -> None:
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            self._send(source, m.Refused("token"))
        elif source in self.members:
            self._welcome(source)
        elif source not in self.gone:
            self._admit(source, hello, now)
        else:
            self._send(source, m.Refused("gone"))

    def _admit(self, source: str, hello: m.Hello, now: float) -> None:
        member = Member(hello.role, hello.name, hello.endpoint, None, hello.holds, hello.host)
        same = [a for a, other in self.members.items() if (other.role, other.name) == (member.role, member.name)]
        self.members[source], self._ring, self._changed = member, None, True
        self._expires[source] = now + self.rules.lease
        if not self._started:
            self._workers = max(self._workers, hello.workers)
        self._welcome(source)
        if same:
            self._remove(same)
        elif self._ready:
            self._next()

    def _welcome(self, source: str) -> None:
        if self._started:
            self._send(source, self.view)

    @property
    def _started(self) -> bool:
        return self.view.number > 0

    @property
    def _ready(self) -> bool:
        enough = len(self.alive("server")) >= self.num_servers and len(self.alive("worker")) >= self.num_workers
        return self._started or enough

    def _expire(self, now: float) -> None:
        silent = [address for address, expires in self._expires.items() if now >= expires]
        if silent:
            self._remove(silent)

    def _remove(self, addresses: list[str]) -> None:
        for address in addresses:
            del self.members[address], self._expires[address]
            self._ring, self._changed = None, True
            self.gone.append(address)
            self.sharing.leave(address)
            self._send(address, m.Refused("gone"))
        if self._ready:
            self._next()

    def _goal(self, key: int) -> tuple[str, ...]:
        if self._ring is None:
            self._ring = Ring({address: self.members[address].host for address in self.alive("server")})
        return self._ring.holders(key, self.rules.replicas)

    def _next(self, chains: dict[int, tuple[str, ...]] | None = None) -> None:
        """Make the next view and tell everybody."""
        for address, member in self.members.items():
            if member.role == "worker" and member.worker is None:
                self._workers += 1  # numbers begin after those in the servers' logs
                self.members[address] = replace(member, worker=self._workers)
        keys = range(self.rules.layout.num_ranges)
        after = {key: self._chain(key, chains or {}) for key in keys}
        steps = {key: next_step(after[key], self._goal(key)) for key in keys}
        joining = {key: step.server for key, step in steps.items() if isinstance(step, Join)}
        workers = {mem.worker: address for address, mem in self.members.items() if mem.worker is not None}
        endpoints = {address: member.endpoint for address, member in self.members.items() if member.endpoint}
        self._changed = True
        self.view = m.View(self.view.number + 1, after, joining, workers, endpoints)
        for address in self.members:
            self._send(address, self.view)
        self._drain(keys)

    def _drain(self, keys: Iterable[int]) -> None:
        """Ask the heads of those ranges whose chains are in the wrong order."""
        for key in keys:
            chain = self.view.chains[key]
            if isinstance(next_step(chain, self._goal(key)), Reorder):
                self._send(chain[0], m.Drain(key))

    def _chain(self, key: int, changed: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
        before = changed.get(key, self.view.chains.get(key))
        if before is None:
            return self._first(key)
        chain = survivors(before, self.alive("server"))
        if not chain:
            raise RangeLostError(
                f"Range {key} was on {', '.join(before)}, and all of them are gone. Use more replicas than servers may "
                f"fail at once (replicas={self.rules.replicas}), or restart from the servers' logs."
            )
        return chain

    def _first(self, key: int) -> tuple[str, ...]:
        """The first chain of a run: the server that brought the longest history, or the ring's choice."""
        brought = {a: member.holds[key] for a, member in self.members.items() if key in member.holds}
        return (max(sorted(brought), key=brought.__getitem__),) if brought else self._goal(key)

    def _send(self, target: str, body: Any) -> None:
        self._out.append(m.Message(MANAGER, target, self.view.number, body))
