"""Zero bubble under a memory limit, for measured times: ZB-1p and ZB-2p.

The one idea: a rank's order is found by playing the step through. Rounds of one forward and one input gradient go over
all ranks; weight gradients fill time that a rank would wait, and make room where the limit is reached. Three choices
are open in this (``Choices``), all eight combinations are played, and the one with the shortest span is taken. Left
out: the integer program of the paper, which its authors report to gain little over the heuristic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from lightning_parallel.measure import bubble
from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.schedule import Action, Kind, Schedule
from lightning_parallel.pipeline.schedules.placement import straight
from lightning_parallel.pipeline.schedules.spec import require, write
from lightning_parallel.pipeline.simulator import simulate

Rows = tuple[tuple[Action, ...], ...]
ROUNDING = 1e-9  # of sums of shares, so that a limit that is met is not passed


def zb_1p(num_ranks: int, num_microbatches: int, weight_share: float = 1.0, costs: Costs | None = None) -> Schedule:
    """The best greedy order in the memory of 1F1B: at most D micro-batches held by any rank.

    The step is played through for the times given: one forward and one input gradient a round on every rank, weight
    gradients where a rank would wait or has no room. Of the eight ways of playing that the heuristic leaves open the
    one with the shortest span is taken. At equal times it is ZB-H1's bubble.

    Args:
        num_ranks: D.
        num_microbatches: M; fewer than D are allowed.
        weight_share: M_W / M_B, the share of a micro-batch's activations that its W needs after its I has run.
        costs: for which the order is made, one entry a stage where stages differ. Left out, T_F = T_I = T_W.

    Example:
        >>> print(zb_1p(2, 3).to_text())
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Source:
        Qi et al., arXiv 2401.10241, section 3.1; the three choices as in the authors' ``scheduler/zb.py``.
    """
    return _automatic("zb_1p", num_ranks, num_microbatches, num_ranks, weight_share, costs)


def zb_2p(num_ranks: int, num_microbatches: int, weight_share: float = 1.0, costs: Costs | None = None) -> Schedule:
    """The best greedy order in twice the memory of 1F1B: at most 2D micro-batches held by any rank.

    Played through as ``zb_1p``, with more forwards before the first backward. At equal times no rank waits within its
    own span from M = 2D - 1 on, as in ZB-H2; at others it is better than ZB-H2.

    Args:
        num_ranks: D.
        num_microbatches: M; fewer than D are allowed.
        weight_share: as of ``zb_1p``.
        costs: as of ``zb_1p``.

    Example:
        >>> zb_2p(4, 8).num_ranks
        4

    Source:
        Qi et al., arXiv 2401.10241, section 3.1, as ``zb_1p``.
    """
    return _automatic("zb_2p", num_ranks, num_microbatches, 2 * num_ranks, weight_share, costs)


def zb_auto(
    num_ranks: int, num_microbatches: int, limit: float = 0, weight_share: float = 1.0, costs: Costs | None = None
) -> Schedule:
    """The best greedy order with at most ``limit`` micro-batches held by any rank.

    Played through as ``zb_1p``. Below D the heuristic's rounds leave large bubbles: use ``v_half`` or ``v_min`` there.

    Args:
        num_ranks: D.
        num_microbatches: M.
        limit: activations of one stage, in micro-batches, >= 1. Left at 0, as many as there are.
        weight_share: as of ``zb_1p``.
        costs: as of ``zb_1p``.

    Raises:
        ValueError: ``limit`` is below 1.

    Example:
        >>> from lightning_parallel.pipeline.simulator import simulate
        >>> max(simulate(zb_auto(4, 8, limit=3)).peak)
        3

    Source:
        Qi et al., arXiv 2401.10241, section 3.1, as ``zb_1p``.
    """
    options = ({"limit": limit} if limit else {}) | ({"weight_share": weight_share} if weight_share != 1 else {})
    name = write("zb_auto", options)
    require(name, limit == 0 or limit >= 1, f"got limit={limit:g}", "A rank holds at least 1 micro-batch.")
    return _automatic(name, num_ranks, num_microbatches, limit or num_microbatches, weight_share, costs)


def _automatic(
    name: str, num_ranks: int, num_microbatches: int, limit: float, weight_share: float, costs: Costs | None
) -> Schedule:
    require(name, 0 < weight_share <= 1, f"got weight_share={weight_share:g}", "It is above 0 and at most 1.")
    if weight_share != 1 and ":" not in name:
        name = write(name, {"weight_share": weight_share})
    costs = costs or Costs()
    orders = [
        _Game(num_ranks, num_microbatches, limit, weight_share, played_for, Choices(*choices)).play()
        for played_for in ((costs,) if costs == Costs() else (costs, Costs()))  # equal times' order may be better
        for choices in product((True, False), repeat=3)
    ]
    made = (Schedule(name, rows, straight(num_ranks), num_microbatches) for rows in dict.fromkeys(orders))
    return min(made, key=lambda schedule: _spans(schedule, costs))


def _spans(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    """The longest span of a rank, then of all ranks together; equal ones are the same to nine digits."""
    timeline = simulate(schedule, costs)
    longest = max(bubble.span_seconds(timeline.rows))
    return float(f"{longest:.9g}"), float(f"{timeline.makespan:.9g}")


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


class _Game:
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
