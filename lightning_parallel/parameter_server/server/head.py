"""The head of a range: takes pushes in once and in order, and makes entries of the range's history from them.

The one idea: a push waits in ``pending`` until it is due, alone, with ``aggregate`` others, or with its whole clock;
what is due becomes one entry, and an entry says which pushes are in it. So counting, combining and dropping happen
once, at the head, and replicas only repeat. Left out: what becomes of entries (``chain.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_parallel.parameter_server.filters import decode
from lightning_parallel.parameter_server.filters.codec import fits
from lightning_parallel.parameter_server.filters.keys import ReceivedKeys
from lightning_parallel.parameter_server.messages import Ack, At, Coded, Entry, Held, Hold, Nack, Push, Values
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.history import Range


@dataclass
class PushStaleness:
    """How many pushes of others came between a worker's read and its push: the most, the sum, over how many."""

    most: int = 0
    total: int = 0
    count: int = 0

    def add(self, value: int) -> None:
        """Count one push."""
        self.most, self.total, self.count = max(self.most, value), self.total + value, self.count + 1


class Intake:
    """What a head knows besides its range.

    Args:
        part: the range.
        rules: the job's agreement.
        staleness: where to go on counting.
    """

    def __init__(self, part: Range, rules: Rules, staleness: PushStaleness | None = None) -> None:
        self.part, self.rules, self.staleness = part, rules, staleness or PushStaleness()
        self.pending: list[Push] = []
        self.taken = dict(part.seqs)
        self.since = 0.0  # when the oldest pending push came
        self.holds: deque[tuple[Hold, float]] = deque()
        self.at: At | None = None
        self.draining = False
        self.keys = ReceivedKeys()

    def take(self, push: Push, acked: int, now: float) -> Ack | Nack | None:
        """Take a push in, or say why not.

        Args:
            push: what came.
            acked: the sender's last push that every replica has.
            now: seconds.
        """
        if push.worker not in self.part.clocks:
            return Nack(push.key, "retired")
        if self.is_duplicate(push):
            return Ack(push.key, acked) if push.seq <= acked else None
        if push.seq != self.taken[push.worker] + 1:
            return Nack(push.key, "gap", self.taken[push.worker] + 1)
        if isinstance(push.values, Coded) and push.values.length != self.part.length:
            return Nack(push.key, "malformed", push.seq)
        known, values = self.keys.expand(push.worker, push.values)
        if not known:
            return Nack(push.key, "keys", push.seq)
        if not fits(values, self.part.length):
            return Nack(push.key, "malformed", push.seq)
        if values is not push.values:
            push = replace(push, values=values)
        self.taken[push.worker] = push.seq
        self.since = self.since if self.pending else now
        self.pending.append(push)
        return None

    def is_duplicate(self, push: Push) -> bool:
        """Whether the push was taken in before."""
        return push.seq <= self.taken[push.worker]

    def hold(self, hold: Hold, now: float) -> None:
        """Queue a reader that wants the range to stand still; asked again, it keeps its place."""
        known = [held.request for held, _ in self.holds if held.worker == hold.worker]
        if hold.request not in known:
            self._give_up(hold.worker)
            self.holds.append((hold, now + self.rules.hold_for))

    def held(self) -> tuple[int, Held] | None:
        """The answer to the reader whose turn it is: its number, and the version at which the range stands."""
        if not self.holds or self.at is not None:
            return None
        hold = self.holds[0][0]
        return hold.worker, Held(hold.key, hold.request, dict(self.part.seqs), self.part.left)

    def release_at(self, at: At) -> Nack | None:
        """Where the reader whose turn it is wants to be answered; request -1 gives up all that it asked for."""
        if at.request == -1:
            self._give_up(at.worker)
            return None
        if not self.holds or (self.holds[0][0].worker, self.holds[0][0].request) != (at.worker, at.request):
            return Nack(at.key, "hold", at.request)
        self.at = at
        return None

    def _give_up(self, worker: int) -> None:
        if self.holds and self.holds[0][0].worker == worker:
            self.at = None
        self.holds = deque(held for held in self.holds if held[0].worker != worker)

    def expire(self, now: float) -> None:
        """Forget readers that kept the range too long, or are gone."""
        while self.holds and (now >= self.holds[0][1] or self.holds[0][0].worker in self.part.left):
            self.holds.popleft()
            self.at = None

    @property
    def wake_at(self) -> float | None:
        """When pending pushes are due by time alone, or a reader has kept the range too long."""
        if self.draining:
            return None
        if self.holds:
            return self.holds[0][1]
        waits = self.pending and not self.rules.consistency.gathers
        return self.since + self.rules.flush_after if waits else None

    def due(self, now: float) -> Iterator[Entry]:
        """The entries that can be made now. The caller applies each before it asks for the next."""
        while self.pending and (group := self._group(now)) is not None:
            if len(group) == len(self.pending):
                self.pending = []
            else:
                chosen = {id(push) for push in group}
                self.pending = [push for push in self.pending if id(push) not in chosen]
            self.since = now
            yield self._entry(group)
        if self.at is not None and self.part.covers(self.at.target):
            at, self.at = self.at, None
            self.holds.popleft()
            yield Entry(self.part.lsn + 1, read=(at.worker, at.request))
            yield from self.due(now)

    def _group(self, now: float) -> list[Push] | None:
        ready = self.pending
        if self.holds:
            target = self.at.target if self.at else {}
            ready = [push for push in ready if push.seq <= target.get(push.worker, 0)]
        if not ready:
            return None
        if self.rules.consistency.gathers:
            return self._ticks(ready) or self._clock(ready)
        full = len(ready) >= self.rules.aggregate or {push.worker for push in ready} >= set(self.part.clocks)
        late = now >= self.since + self.rules.flush_after
        return ready[: self.rules.aggregate] if full or late or self.at else None

    def _ticks(self, ready: Sequence[Push]) -> list[Push]:
        """Pushes without values that nothing of their worker comes before: nobody has to wait for them."""
        next_of = {push.worker: push for push in reversed(ready)}
        return [push for push in next_of.values() if push.values is None]

    def _clock(self, ready: Sequence[Push]) -> list[Push] | None:
        """The pushes of the next clock in the order of workers, once every active worker has made its own."""
        clock = min(push.clock for push in ready)
        there = self.part.clocks.copy()
        for push in ready:
            there[push.worker] = max(push.clock, there.get(push.worker, 0))
        if min(there.values()) < clock:
            return None
        return sorted((p for p in ready if p.clock <= clock), key=lambda push: (push.worker, push.seq))

    def _entry(self, group: Sequence[Push]) -> Entry:
        kept = self._kept(group)
        marks = {push.worker: (push.seq, push.clock) for push in group}
        rate = next((push.lr for push in reversed(kept) if push.lr is not None), None)
        full = sum(push.values is not None for push in group)
        push = self._combined([push.values for push in kept if push.values is not None], len(marks))
        return Entry(self.part.lsn + 1, push, rate, marks, len(group), full - len(kept))

    def _kept(self, group: Sequence[Push]) -> list[Push]:
        """Those pushes that have values and are not too old; each one's age is counted as if applied in turn."""
        kept, before = [], dict[int, int]()
        for push in group:
            others = self.part.others(push.worker) + sum(n for w, n in before.items() if w != push.worker)
            before[push.worker] = before.get(push.worker, 0) + 1
            self.staleness.add(others - push.others)
            if push.values is not None and not self.rules.consistency.drops(others - push.others):
                kept.append(push)
        return kept

    def _combined(self, values: list[Values], num_workers: int) -> Values | None:
        count = num_workers if self.rules.consistency.gathers else len(self.part.clocks)
        if self.rules.scale == "sum":
            count = 1
        if not values or (len(values) == 1 and count == 1):
            return values[0] if values else None
        total = _sum(values)
        return total if count == 1 else total.div_(count)


def _sum(values: Sequence[Values]) -> Tensor:
    first = decode(values[0])
    total = first if isinstance(values[0], Coded) else torch.clone(first)
    for other in values[1:]:
        total.add_(decode(other))
    return total
