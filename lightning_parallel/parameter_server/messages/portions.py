"""About the portions of a batch: between the manager, who hands them out, a coordinator and idle workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batch:
    """A coordinator has a batch to be done, in portions; it takes the place of the one before it. Without portions it
    asks for the number of the last one, and the manager's answer says that."""

    batch: int
    count: int


@dataclass(frozen=True, slots=True)
class Idle:
    """A worker has nothing to do, and would rather have one portion than another."""

    prefers: int = -1


@dataclass(frozen=True, slots=True)
class Portion:
    """What an idle worker is to do."""

    batch: int
    portion: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has done a portion, and every range has its result; what it came to, such as a loss."""

    batch: int
    portion: int
    value: float


@dataclass(frozen=True, slots=True)
class Counted:
    """The manager has heard that a portion is done; ``first`` is 1 if that was the first time."""

    batch: int
    portion: int
    first: int


@dataclass(frozen=True, slots=True)
class Done:
    """Every portion is done; the sum of their values, each counted once."""

    batch: int
    value: float
