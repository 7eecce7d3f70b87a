"""With the manager: who comes, stays, goes; how a chain gets to where it should be. And the passing of time."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Hello:
    """A process comes: role ``server`` or ``worker``, its name, the proof that it belongs to the job."""

    role: str
    name: str
    token: str = ""
    endpoint: str = ""
    holds: dict[int, int] = field(default_factory=dict)  # key -> lsn, of a server that read its log
    workers: int = 0  # the highest number of a worker in that log
    host: str = ""  # of a server; replicas lie on different ones where there are several


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
