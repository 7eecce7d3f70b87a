"""Which messages a state machine believes: of whom they come, and whether what they hold can be.

The one idea: who sends a message is known (``transport/inbox.py``), and every kind of message has few who may say it:
views come from the manager, a worker speaks for itself, entries come from the server before this one. What is said by
somebody else, or cannot be, is counted and dropped, and never raised. Left out: lies that could be true.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.filters.codec import fits
from lightning_parallel.parameter_server.layout import Layout
from lightning_parallel.parameter_server.server.chain import MANAGER

ROLES = ("server", "worker", "coordinator", "helper")
MOST = 1 << 48  # workers, batches and pushes, whatever is counted
MOST_PORTIONS = 1 << 20
_OF_MANAGER = (m.View, m.Refused, m.Drain, m.Batch, m.Done, m.Portion, m.Counted)
_OF_WORKER = (m.Push, m.Pull, m.Begin, m.Hold, m.At)


def of_manager(message: m.Message) -> bool:
    """Whether a message is none that only the manager sends, or comes from it."""
    return message.source == MANAGER or not isinstance(message.body, _OF_MANAGER)


def for_server(source: str, body: Any, me: str, view: m.View) -> bool:
    """Whether a server acts on what is said of a range that it holds or copies.

    Example:
        >>> view = m.View(1, {0: ("a", "b")}, workers={7: "w"})
        >>> for_server("w", m.Begin(0, 7, 3), "a", view), for_server("v", m.Begin(0, 7, 3), "a", view)
        (True, False)
        >>> for_server("a", m.Committed(0, 9), "b", view), for_server("b", m.Committed(0, 9), "a", view)
        (False, True)
    """
    kind = type(body)
    if kind in _OF_WORKER:
        owner = view.workers.get(body.worker)
        if kind is m.Push:  # of a worker that is gone it is answered
            pull = body.pull
            return owner in (source, None) and (pull is None or (pull.key, pull.worker) == (body.key, body.worker))
        return owner == source
    chain = view.chains.get(body.key, ()) if kind in (m.Append, m.Copy, m.Committed) else ()
    if kind is m.Committed:
        return me in chain and source in chain[chain.index(me) + 1 :]
    if kind in (m.Append, m.Copy):
        before = chain[: chain.index(me)] if me in chain else chain
        return before[-1:] == (source,)
    return True


def for_worker(source: str, body: Any, view: m.View, layout: Layout, worker: int | None) -> bool:
    """Whether a worker acts on what is said of a range."""
    if source not in view.chains.get(body.key, ()):
        return False
    if isinstance(body, m.Rows):
        values = body.values
        long = values.numel() if isinstance(values, Tensor) else values.length
        return worker is not None and long == layout.length(body.key) and fits(values, long)
    return True


def for_coordinator(source: str, value: m.Value, view: m.View, layout: Layout) -> bool:
    """Whether a coordinator or helper takes an answer of a range."""
    if source not in view.chains.get(value.key, ()):
        return False
    return value.values is None or (
        value.values.is_floating_point() and value.values.numel() == layout.length(value.key)
    )


def for_manager(source: str, body: Any, layout: Layout) -> bool:
    """Whether what a process says to the manager can be."""
    if isinstance(body, m.Hello):
        holds = all(0 <= key < layout.num_ranges and 0 <= lsn < MOST for key, lsn in body.holds.items())
        return source not in ("", MANAGER) and body.role in ROLES and 0 <= body.workers < MOST and holds
    if isinstance(body, m.Batch):
        return 0 <= body.batch < MOST and body.count <= MOST_PORTIONS
    return True
