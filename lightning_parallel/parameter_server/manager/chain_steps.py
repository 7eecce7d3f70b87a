"""How the chain of a range gets from where it is to where it should be, without ever being unsafe: one step at a time.

    servers die          the rest of the chain goes on, in its order
    a server is missing  it copies the range from the tail, then becomes the tail
    the order is wrong   the head takes in nothing more until all are equal; then any order will do

The one idea: look at the chain and at its goal, and name the next step; whatever happens in between, look again. Left
out: who the goal is (``ring.py``), sending (``manager.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Join:
    """A server copies the range from the tail."""

    server: str


@dataclass(frozen=True)
class Reorder:
    """Once drained, the chain becomes its goal."""


@dataclass(frozen=True)
class Settled:
    """Nothing is left to do."""


Step = Join | Reorder | Settled


def survivors(chain: tuple[str, ...], alive: Collection[str]) -> tuple[str, ...]:
    """The chain without the dead, in its order: each has all that the ones behind it have."""
    return tuple(server for server in chain if server in alive)


def next_step(chain: tuple[str, ...], goal: tuple[str, ...]) -> Step:
    """What a chain of living servers has to do next.

    Example:
        >>> next_step(("a", "b"), ("c", "a", "b")), next_step(("a", "b", "c"), ("c", "a"))
        (Join(server='c'), Reorder())
        >>> next_step(("c", "a"), ("c", "a"))
        Settled()
    """
    missing = [server for server in goal if server not in chain]
    if missing:
        return Join(missing[0])
    return Settled() if chain == goal else Reorder()
