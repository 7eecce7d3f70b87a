"""Between workers, or a coordinator, and the servers of a range: pushes to its head, pulls to its tail, answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_parallel.parameter_server.messages.values import Seqs, Values


@dataclass(frozen=True, slots=True)
class Seed:
    """The first weights of a range; only the first one counts."""

    key: int
    values: Tensor


@dataclass(frozen=True, slots=True)
class Pull:
    """Asks for a range once the least clock is ``need``, the worker's own push ``own`` is in it, and all of ``least``,
    worker -> seq."""

    key: int
    worker: int
    request: int
    need: int = 0
    own: int = 0
    least: Seqs = field(default_factory=dict)


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
    pull: Pull | None = None  # what the worker asks next, where the head is the tail as well


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


@dataclass(frozen=True, slots=True)
class Call:
    """Arithmetic on a range's named vectors, in order with its updates and done once, see ``sandblaster.py``.

    With a portion it is the result of one, which counts once whoever sends it, and only while its batch is the range's;
    with a batch alone it begins that batch.
    """

    key: int
    request: int
    words: tuple[Any, ...]
    values: Values | None = None
    batch: int = 0
    portion: int = -1


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


@dataclass(frozen=True, slots=True)
class Read:
    """Asks the tail for a named vector as it is in a batch, see ``helper.py``."""

    key: int
    request: int
    name: str
    batch: int


@dataclass(frozen=True, slots=True)
class Value:
    """What a call came to, or the vector that was asked for, or why there is neither."""

    key: int
    request: int
    value: float
    values: Tensor | None = None
    refusal: str = ""
