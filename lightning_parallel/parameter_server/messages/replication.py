"""Between the servers of a range: its history down the chain, copies, how far the tail is."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lightning_parallel.parameter_server.messages.values import Entry, Seqs


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
class Want:
    """A server lacks what comes after ``lsn``: asks the one before it in the chain for it, or for a copy of all."""

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
    counted: tuple[int, ...] = ()  # portions of the batch in hand
