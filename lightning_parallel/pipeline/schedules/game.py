"""A step of a zero-bubble pipeline under a memory limit, played through.

The one idea: rounds of one forward and one input gradient go over all ranks; weight gradients fill time that a rank
would wait, and make room where the limit is reached. Source: Qi et al., arXiv 2401.10241, section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.schedule import Action, Kind

Rows = tuple[tuple[Action, ...], ...]
ROUNDING = 1e-9  # of sums of shares, so that a limit that is met is not passed


@dataclass(frozen=True)
class Choices:
    """What the heuristic leaves open.

    Args:
        wait_for_first: before its first input gradient a rank stops to forward as soon as one more would delay that
            gradient, instead of as soon as the gradient is there.
        gradients_first: a forward is put off if it would delay the input gradients that others wait for.
        fill: a weight gradient that overfills a wait is run even if other ranks have waited longer.
    """

    wait_for_first: bool
    gradients_first: bool
    fill: bool


class _Rank:
    """One rank in play: its clock, what it holds, what it has done and when."""

    def __init__(self, rank: int, costs: Costs, weight_share: float) -> None:
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        self.rank, self.weight_share = rank, weight_share
        self.costs = {kind: costs.of(Action(kind, rank, 0)) for kind in kinds}
        self.clock = self.waited = 0.0
        self.actions: list[Action] = []
        self.ends: dict[str, list[float]] = {kind: [] for kind in kinds}

    def done(self, kind: str) -> int:
        return len(self.ends[kind])

    @property
    def held(self) -> float:
        """Activations that are kept, in micro-batches."""
        share = self.weight_share
        return self.done("F") - (1 - share) * self.done("I") - share * self.done("W")

    @property
    def owes(self) -> int:
        """Weight gradients that could run."""
        return self.done("I") - self.done("W")

    def run(self, kind: Kind, arrival: float = 0.0) -> None:
        wait = max(0.0, arrival - self.clock)
        self.waited += wait if self.actions else 0.0
        self.clock += wait + self.costs[kind]
        self.actions.append(Action(kind, self.rank, self.done(kind)))
        self.ends[kind].append(self.clock)


class Game:
    """A step played through with one set of choices."""

    def __init__(
        self, num_ranks: int, total: int, limit: float, weight_share: float, costs: Costs, choices: Choices
    ) -> None:
        self.ranks = [_Rank(rank, costs, weight_share) for rank in range(num_ranks)]
        self.total, self.limit, self.costs, self.choices = total, limit + ROUNDING, costs, choices

    def play(self) -> Rows:
        """All ranks' rows."""
        self.warm_up()
        for microbatch in range(1, self.total):
            self.forwards()
            for rank in reversed(self.ranks):
                self.input_gradient(rank, microbatch)
        for rank in self.ranks:
            while rank.done("W") < self.total:
                rank.run("W")
        return tuple(tuple(rank.actions) for rank in self.ranks)

    def arrival(self, rank: _Rank, kind: Kind) -> float:
        """When the input of the rank's next F or I is there."""
        source = rank.rank + (-1 if kind == "F" else 1)
        if not 0 <= source < len(self.ranks):
            return 0.0
        return self.ranks[source].ends[kind][rank.done(kind)] + self.costs.hop(source, rank.rank)

    # -- the first round -----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """The first forward on every rank, what fits before its gradient returns, and that gradient."""
        for rank in self.ranks:
            rank.run("F", self.arrival(rank, "F"))
        extra = self.forwards_that_fit()
        for before, at in zip(range(len(extra)), range(1, len(extra)), strict=False):
            if extra[at] >= extra[before] and 1 + extra[at] < self.total:  # a rank is ahead of the next one
                extra[at] = max(0, min(extra[at], extra[before] - 1))
        for rank, count in zip(self.ranks, extra, strict=True):
            for _ in range(count):
                rank.run("F", self.arrival(rank, "F"))
        for rank in reversed(self.ranks):
            rank.run("I", self.arrival(rank, "I"))

    def forwards_that_fit(self) -> list[int]:
        """How many more forwards each rank has time and room for before its first input gradient can run."""
        last = self.ranks[-1]
        extra, first_gradient = [0], last.clock + last.costs["I"]
        for rank in reversed(self.ranks[:-1]):
            gradient_there = first_gradient + self.costs.hop(rank.rank + 1, rank.rank)
            margin = rank.costs["F"] if self.choices.wait_for_first else 0.0
            clock, count = rank.clock, 0
            while 1 + count < self.total and rank.held + count + 1 <= self.limit:
                if clock + margin > gradient_there or (not margin and clock >= gradient_there):
                    break
                clock, count = clock + rank.costs["F"], count + 1
            extra.append(count)
            first_gradient = max(clock, gradient_there) + rank.costs["I"]
        return extra[::-1]

    # -- the other rounds ----------------------------------------------------------------------------------------------

    def forwards(self) -> None:
        """One forward on the ranks from some rank on... up to the last: a rank forwards only if the next one does."""
        wanted = [self.wants_forward(rank) for rank in self.ranks]
        for at in range(len(wanted) - 2, -1, -1):
            wanted[at] = wanted[at] and wanted[at + 1]
        for rank, wants in zip(self.ranks, wanted, strict=True):
            if wants:
                while rank.held + 1 > self.limit and rank.owes:
                    rank.run("W")
                self.fill(rank, "F")
                rank.run("F", self.arrival(rank, "F"))

    def wants_forward(self, rank: _Rank) -> bool:
        if rank.done("F") >= self.total:
            return False
        following = self.ranks[rank.rank + 1] if rank.rank + 1 < len(self.ranks) else None
        ahead = following is not None and rank.done("F") >= following.done("F") + 2
        if following is None or not (self.choices.gradients_first and ahead):
            return True
        gradient_there = following.clock + following.costs["F"] + following.costs["I"]
        gradient_there += self.costs.hop(following.rank, rank.rank)
        if rank.clock >= gradient_there:
            return False
        excess = max(0.0, rank.held + 1 - self.limit)
        room = min(rank.owes, math.ceil(excess / rank.weight_share))  # weight gradients that make room
        if rank.clock + rank.costs["F"] + room * rank.costs["W"] <= gradient_there:
            return True
        return gradient_there - rank.clock > self.slack(rank)

    def input_gradient(self, rank: _Rank, microbatch: int) -> None:
        self.fill(rank, "I")
        if rank.rank == 0 and rank.done("F") == self.total:  # nobody waits for the first rank's gradient
            while rank.owes:
                rank.run("W")
        rank.run("I", self.arrival(rank, "I"))

    def fill(self, rank: _Rank, kind: Kind) -> None:
        """Weight gradients in the time that the rank would wait for the input of its next F or I."""
        arrival = self.arrival(rank, kind)
        while rank.owes and rank.clock + rank.costs["W"] <= arrival:
            rank.run("W")
        if rank.owes and rank.clock < arrival and (self.choices.fill or arrival - rank.clock > self.slack(rank)):
            rank.run("W")

    def slack(self, rank: _Rank) -> float:
        """How much longer than this rank the one that waited most has waited."""
        return max(other.waited for other in self.ranks) - rank.waited
