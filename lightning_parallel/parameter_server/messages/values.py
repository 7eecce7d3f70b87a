"""What bodies are made of: vectors as they travel, the view, an entry of a range's history."""

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
    call: tuple[Any, ...] | None = None  # (caller, request, batch, portion, words ...): arithmetic, sandblaster.py
