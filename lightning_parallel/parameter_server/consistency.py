"""How stale a read may be: one small class for each rule.

The one idea: a rule answers a few pure questions about a read or a push, and the state machines act on the answers: how
far must the least clock be before a worker at clock c may read, must the read hold the worker's own pushes, is a
clock's work gathered before it is applied, are readers told without asking, is a push too old. Left out: everything
else.

Blocking is on the read, never on the push. A worker at clock c has finished c iterations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Consistency:
    """What all rules answer; each rule overrides the answers that make it what it is.

    Attributes:
        gathers: a clock's pushes are combined, in the order of workers, into one update when all are there.
        eager: readers are sent the weights whenever the least clock moves.
        own: a read holds all pushes that the reader made before it.
    """

    gathers = False
    eager = False
    own = True

    def need(self, clock: int) -> int:
        """The least clock that must be reached before a worker at ``clock`` may read."""
        raise NotImplementedError

    def drops(self, staleness: int) -> bool:
        """Whether a push is thrown away that was made ``staleness`` pushes of others after its read."""
        del staleness
        return False


@dataclass(frozen=True)
class BSP(Consistency):
    """Bulk synchronous: a read at clock c sees all of clocks 0 to c-1 and nothing else; a clock is one update.

    With the mean over workers it is synchronous SGD on the joined batch.

    Example:
        >>> BSP().need(5)
        5

    Source:
        Valiant, A bridging model for parallel computation, CACM 1990.
    """

    gathers = True

    def need(self, clock: int) -> int:
        return clock


@dataclass(frozen=True)
class SSP(Consistency):
    """Stale synchronous: a read at clock c sees every update of clocks up to c-s-1, and maybe newer ones.

    The gap between the fastest and the slowest worker is at most s at a read and s+1 after a tick. s = 0 has BSP's
    gate; ``BSP`` also applies a clock as one update.

    Args:
        staleness: s, clocks, >= 0.

    Raises:
        ValueError: s is negative.

    Example:
        >>> [SSP(2).need(clock) for clock in range(5)]
        [0, 0, 0, 1, 2]

    Source:
        Ho et al., NIPS 2013, section 3.
    """

    staleness: int = 1

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(f"SSP got staleness={self.staleness}. It counts clocks: use 0 or more.")

    def need(self, clock: int) -> int:
        return max(0, clock - self.staleness)


@dataclass(frozen=True)
class ESSP(SSP):
    """SSP whose servers send the weights to readers when the least clock moves, so that reads are fresher.

    Source:
        Dai et al., High-Performance Distributed ML at Scale through Parameter Server Consistency Models, AAAI 2015.
    """

    eager = True


@dataclass(frozen=True)
class BoundedDelay(Consistency):
    """A worker's iteration t starts when all iterations before t - delay are finished everywhere.

    The gate is SSP's. What differs is that a read does not wait for the reader's own newest pushes: up to ``delay`` of
    them may be under way.

    Args:
        delay: tau, iterations, >= 0; 0 is sequential.

    Raises:
        ValueError: the delay is negative.

    Example:
        >>> BoundedDelay(1).need(5)
        4

    Source:
        Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014, section 3.5.
    """

    delay: int = 1
    own = False

    def __post_init__(self) -> None:
        if self.delay < 0:
            raise ValueError(f"BoundedDelay got delay={self.delay}. It counts iterations: use 0 or more.")

    def need(self, clock: int) -> int:
        return max(0, clock - self.delay)


@dataclass(frozen=True)
class Asynchronous(Consistency):
    """Nobody waits for anybody; a read holds the reader's own pushes.

    Source:
        Dean et al., Large Scale Distributed Deep Networks (Downpour SGD), NIPS 2012, section 4.1.
    """

    def need(self, clock: int) -> int:
        del clock
        return 0


@dataclass(frozen=True)
class Sandblaster(Asynchronous):
    """Nobody pushes: a coordinator has the servers make each step, of gradients that workers compute in portions.

    Source:
        Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.2.
    """


@dataclass(frozen=True)
class DropOlderThan(Asynchronous):
    """Asynchronous, and a push that comes more than so many pushes of others after its read is thrown away.

    A dropped push still ticks the clock and uses up its sequence number, so that nobody waits for it and no replay
    brings it back; it is counted.

    Args:
        staleness: pushes of other workers between a worker's read and its push, >= 0.

    Example:
        >>> DropOlderThan(3).drops(3), DropOlderThan(3).drops(4)
        (False, True)
    """

    staleness: int = 8

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(f"DropOlderThan got staleness={self.staleness}. It counts pushes: use 0 or more.")

    def drops(self, staleness: int) -> bool:
        return staleness > self.staleness


def staleness_bound(num_workers: int, staleness: int) -> int:
    """Most pushes of others between a worker's read and its push under SSP(s): (P - 1)(2s + 1).

    At the read the others are between s clocks behind and s ahead, and at the push no more than s + 1 ahead of a
    reader whose own clock has not moved: 2s + 1 pushes each.

    Example:
        >>> staleness_bound(num_workers=4, staleness=1)
        9
    """
    return (num_workers - 1) * (2 * staleness + 1)
