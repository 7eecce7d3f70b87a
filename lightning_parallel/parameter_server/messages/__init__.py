"""What workers, servers and the manager say to each other: plain data, one class a kind.

The one idea: a ``Message`` is an envelope with a view number around one body, and a body says everything that its
receiver needs. The state machines take and give these objects; a transport turns them into bytes (``wire``) or hands
them over. Left out: who reacts how.

Words: *key* is the number of a range. *worker* is the number that the manager gave to a worker, new for every start of
it. *seq* counts a worker's pushes to a range from 1. *marks* are worker -> (seq, clock). *head* and *tail* are the
first and the last server of a range's chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_parallel.parameter_server.messages.membership import (
    Copied,
    Drain,
    Drained,
    Hello,
    Lease,
    Leave,
    Refused,
    Wake,
)
from lightning_parallel.parameter_server.messages.portions import Batch, Counted, Done, Finished, Idle, Portion
from lightning_parallel.parameter_server.messages.replication import Append, Committed, Copy, Want
from lightning_parallel.parameter_server.messages.training import (
    Ack,
    At,
    Begin,
    Call,
    Held,
    Hold,
    Nack,
    Pull,
    Push,
    Read,
    Rows,
    Seed,
    Value,
)
from lightning_parallel.parameter_server.messages.values import Coded, Entry, Marks, Seqs, Values, View

Body = Any


@dataclass(frozen=True, slots=True)
class Message:
    """One envelope: from, to, the sender's view, the body."""

    source: str
    target: str
    view: int
    body: Body


__all__ = [
    "Ack",
    "Append",
    "At",
    "Batch",
    "Begin",
    "Body",
    "Call",
    "Coded",
    "Committed",
    "Copied",
    "Copy",
    "Counted",
    "Done",
    "Drain",
    "Drained",
    "Entry",
    "Finished",
    "Held",
    "Hello",
    "Hold",
    "Idle",
    "Lease",
    "Leave",
    "Marks",
    "Message",
    "Nack",
    "Portion",
    "Pull",
    "Push",
    "Read",
    "Refused",
    "Rows",
    "Seed",
    "Seqs",
    "Value",
    "Values",
    "View",
    "Wake",
    "Want",
]
