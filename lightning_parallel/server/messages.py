"""What workers, servers and the manager say to each other: plain data, one class a kind.

The one idea: a ``Message`` is an envelope with a view number around one body, and a body says everything that its
receiver needs. The state machines take and give these objects; a transport turns them into bytes (``wire.py``) or hands
them over. Left out: who reacts how.

Words: *key* is the number of a range. *worker* is the number that the manager gave to a worker, new for every start of
it. *seq* counts a worker's pushes to a range from 1. *marks* are worker -> (seq, clock). *head* and *tail* are the
first and the last server of a range's chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Marks = dict[int, tuple[int, int]]
Seqs = dict[int, int]


@dataclass(frozen=True, slots=True)
class Coded:
    """A vector as a filter left it: the codec's name, the vector's length, raw tensors and small numbers."""

    codec: str
    length: int
    parts: tuple[Tensor, ...] = ()
    numbers: tuple[float, ...] = ()


Values = Tensor | Coded


@dataclass(frozen=True, slots=True)
class View:
    """Who takes part: servers of every range, first to last, and workers with their addresses."""

    number: int = 0
    chains: dict[int, tuple[str, ...]] = field(default_factory=dict)
    joining: dict[int, str] = field(default_factory=dict)  # key -> server that copies the range from the tail
    workers: dict[int, str] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)  # address -> where a transport finds it


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a range's history. Replicas that applied the same entries are equal, bit for bit."""

    lsn: int
    push: Values | None = None
    lr: float | None = None
    marks: Marks = field(default_factory=dict)
    pushes: int = 0
    dropped: int = 0
    seed: Tensor | None = None
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    view: int = 0  # first entry of a view, by its head: whoever has it has all that was ever acknowledged
    read: tuple[int, int] | None = None  # (worker, request): the tail answers it at exactly this place
    call: tuple[Any, ...] | None = None  # (caller, request, words ...): arithmetic on named vectors, sandblaster.py


# A worker, or whoever has the first weights, to a head.
@dataclass(frozen=True, slots=True)
class Seed:
    """The first weights of a range; only the first one counts."""

    key: int
    values: Tensor


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's update of a range. Without values it only ticks."""

    key: int
    worker: int
    seq: int
    clock: int  # the worker's clock once this is taken in
    values: Values | None = None
    others: int = 0  # pushes of other workers in the weights that it was computed from
    lr: float | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """A worker that ranges let in at different clocks begins at the latest of them."""

    key: int
    worker: int
    clock: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Asks the head to apply nothing more until ``At`` says up to where, so that all ranges meet in one version."""

    key: int
    worker: int
    request: int


@dataclass(frozen=True, slots=True)
class At:
    """The version, worker -> seq, at which the holder of a range is to be answered."""

    key: int
    worker: int
    request: int
    target: Seqs


# A worker to a tail.
@dataclass(frozen=True, slots=True)
class Pull:
    """Asks for a range once the least clock is ``need`` and the worker's own push ``own`` is in it."""

    key: int
    worker: int
    request: int
    need: int = 0
    own: int = 0


# A server to a worker.
@dataclass(frozen=True, slots=True)
class Rows:
    """The weights of a range, and what they hold: every push of ``seqs``. Request -1: sent without being asked."""

    key: int
    request: int
    values: Values
    seqs: Seqs
    clocks: dict[int, int]
    minimum: int
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """The head holds the range for a request, at this version."""

    key: int
    request: int
    seqs: Seqs
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ack:
    """Every push up to ``seq`` is with all replicas."""

    key: int
    seq: int


@dataclass(frozen=True, slots=True)
class Nack:
    """A push or a hold was refused: ``gap`` or ``keys`` (send from ``seq``), ``retired``, ``malformed``, ``hold`` (ask
    again)."""

    key: int
    reason: str
    seq: int = 0


# A server to a server.
@dataclass(frozen=True, slots=True)
class Append:
    """The next entry of a range's history, down the chain."""

    key: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Committed:
    """The tail has everything up to ``lsn``, and so have all before it."""

    key: int
    lsn: int


@dataclass(frozen=True, slots=True)
class Copy:
    """All of a range at one place of its history, for a server that joins its chain."""

    key: int
    numbers: dict[str, int]
    tensors: dict[str, Tensor]
    seqs: Seqs
    clocks: dict[int, int]
    left: tuple[int, ...] = ()
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)


# With the manager.
@dataclass(frozen=True, slots=True)
class Hello:
    """A process comes: role ``server`` or ``worker``, its name, the proof that it belongs to the job."""

    role: str
    name: str
    token: str = ""
    endpoint: str = ""
    holds: dict[int, int] = field(default_factory=dict)  # key -> lsn, of a server that read its log
    workers: int = 0  # the highest number of a worker in that log


@dataclass(frozen=True, slots=True)
class Lease:
    """Still here."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Going, in order."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The manager does not know the sender (any more), or its token."""

    reason: str


@dataclass(frozen=True, slots=True)
class Copied:
    """A server that joins a range's chain has its copy."""

    key: int


@dataclass(frozen=True, slots=True)
class Want:
    """A server lacks what comes after ``lsn``: asks the one before it in the chain for it, or for a copy of all."""

    key: int
    lsn: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Asks a head to take in nothing more and to say when every replica is equal."""

    key: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Every replica of the range is equal, and nothing is under way."""

    key: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Time has passed: a transport gives this to a state machine whose ``wake_at`` has come."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arithmetic on a range's named vectors, in order with its updates and done once, see ``sandblaster.py``."""

    key: int
    request: int
    words: tuple[Any, ...]
    values: Values | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """What a call came to."""

    key: int
    request: int
    value: float
    values: Tensor | None = None


Body = Any


@dataclass(frozen=True, slots=True)
class Message:
    """One envelope: from, to, the sender's view, the body."""

    source: str
    target: str
    view: int
    body: Body
