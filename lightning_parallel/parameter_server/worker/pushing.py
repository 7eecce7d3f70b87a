"""The half of a worker that writes: pushes under way, kept until all replicas have them.

The one idea: a push is numbered and kept until it is acknowledged, and is sent again to whoever heads the range in a
new view; the servers count, so that it is applied once. Left out: reading (``client.py``), which needs to know of
pushes only how many there were.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.filters import Filters
from lightning_parallel.parameter_server.filters.keys import SentKeys
from lightning_parallel.parameter_server.rules import Rules


class Pushing:
    """What a worker sends to the heads of ranges.

    Args:
        address: how others name the worker.
        rules: the job's agreement.
        filters: what pushes go through before they are sent.
    """

    def __init__(self, address: str, rules: Rules, filters: Filters | None = None) -> None:
        self.address, self.rules, self.filters = address, rules, filters
        self.worker: int | None = None
        self.view = m.View()
        self.clock: int | None = None  # finished iterations; None before the first pull
        self.seq = 0
        self.keys = tuple(range(rules.layout.num_ranges))
        self.unacked: dict[int, dict[int, m.Push]] = {key: {} for key in self.keys}
        self._sent_keys = SentKeys()
        self._others = dict.fromkeys(self.keys, 0)
        self._seed: Tensor | None = None
        self._resend_at = 0.0
        self._out: list[m.Message] = []
        self.foreign = 0  # messages that their sender may not say, or that cannot be

    def seed(self, vector: Tensor) -> list[m.Message]:
        """Offer first weights; the first that come to a range count. Called once the view is there."""
        self._seed = vector.clone()
        self._offer()
        return self._flush()

    def _offer(self) -> None:
        """Offer the first weights until something was read."""
        if self.clock is None and self._seed is not None:
            for key, values in enumerate(self.rules.layout.split(self._seed)):
                self._to_head(key, m.Seed(key, values))

    @property
    def may_push(self) -> bool:
        """Whether every range has room for one more push under way."""
        return all(len(pushes) < self.rules.window for pushes in self.unacked.values())

    @property
    def is_settled(self) -> bool:
        """Whether every push is with all replicas."""
        return not any(self.unacked.values())

    def push(
        self, vector: Tensor | None, now: float, tick: bool = True, lr: float | None = None, copy: bool = True
    ) -> list[m.Message]:
        """Send an update of all ranges; without a vector it only ticks, as after a skipped step.

        Args:
            vector: shape (size,), float32.
            now: seconds.
            tick: whether the iteration ends with it.
            lr: learning rate of this push, or None for the update's own.
            copy: keep a copy until all replicas have it; without one, the caller leaves the vector alone until then.
        """
        assert self.worker is not None and self.clock is not None, "pull before you push"
        self.seq += 1
        self.clock += int(tick)
        for key, values in enumerate(self._parts(vector, copy)):
            push = m.Push(key, self.worker, self.seq, self.clock, values, self._others[key], lr)
            self.unacked[key][self.seq] = push
            self._push(push)
        self._resend_at = now + self.rules.resend_after
        return self._flush()

    def _parts(self, vector: Tensor | None, copy: bool) -> list[m.Values | None]:
        if vector is None:
            return [None] * len(self.keys)
        if self.filters is None:
            return [*self.rules.layout.split(vector.clone() if copy else vector)]
        return [self.filters.encode(key, part) for key, part in enumerate(self.rules.layout.split(vector))]

    def replay(self) -> None:
        """Send every push again that may be lost."""
        self._offer()
        self._sent_keys.forget()
        for key in self.keys:
            self._push_from(key, 0)

    def _push_from(self, key: int, seq: int) -> None:
        for number in sorted(self.unacked[key]):
            if number >= seq:
                self._push(self.unacked[key][number])

    def _push(self, push: m.Push) -> None:
        if isinstance(push.values, m.Coded):
            push = replace(push, values=self._sent_keys.shrink(push.key, push.values))
        self._to_head(push.key, push)

    def _acked(self, key: int, seq: int, now: float) -> None:
        """Every push up to a number is with all replicas of a range; while there is such news, nothing is lost."""
        if key not in self.unacked or seq > self.seq:
            self.foreign += 1
            return
        pushes = self.unacked[key]
        for number in [number for number in pushes if number <= seq]:
            del pushes[number]
            self._resend_at = now + self.rules.resend_after

    def _refused(self, nack: m.Nack) -> None:
        """A server lacks what comes before a push, or a list of places."""
        if nack.seq in self.unacked[nack.key]:  # else it was said long ago
            self._sent_keys.forget()
            self._push_from(nack.key, nack.seq)

    def _to_head(self, key: int, body: m.Body) -> None:
        if key in self.view.chains:
            self._send(self.view.chains[key][0], body)

    def _send(self, target: str, body: Any) -> None:
        self._out.append(m.Message(self.address, target, self.view.number, body))

    def _flush(self) -> list[m.Message]:
        out, self._out = self._out, []
        return out


def joined(messages: list[m.Message]) -> list[m.Message]:
    """Pulls that go where a push of the same range goes, inside of it."""
    pulls = {(one.target, one.body.key): one.body for one in messages if isinstance(one.body, m.Pull)}
    joined = []
    for one in messages:
        body = one.body
        if isinstance(body, m.Push):
            pull = pulls.pop((one.target, body.key), None)
            joined.append(one if pull is None else replace(one, body=replace(body, pull=pull)))
        elif not isinstance(body, m.Pull) or (one.target, body.key) in pulls:
            joined.append(one)
    return joined
