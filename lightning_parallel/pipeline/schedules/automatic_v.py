"""ZB-V for measured times: two stages a rank, laid in a V, in an order that is found by playing the step through.

The one idea: a micro-batch passes every rank four times: forwards on the way out and back, input gradients on the way
out (of the stages that lay on the way back) and back. In a round each rank does one input gradient and one forward, the
leg that another rank waits for first; weight gradients fill the time that a rank would wait, and make room where the
limit is reached. Left out: stages of one rank that differ in memory.
"""

from __future__ import annotations

from collections import deque

from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.schedule import Action, Kind, Schedule
from lightning_parallel.pipeline.schedules.automatic import spans
from lightning_parallel.pipeline.schedules.placement import vee
from lightning_parallel.pipeline.schedules.spec import require, write

OUT, BACK = 0, 1  # the legs of a pass along the ranks
# Whether weight gradients may overfill waits before input gradients on the way out, and before forwards.
_FILLS = ((True, True), (True, False), (False, True), (False, False))


def zb_v_auto(
    num_ranks: int, num_microbatches: int, limit: float = 0, weight_share: float = 1.0, costs: Costs | None = None
) -> Schedule:
    """Rank r holds stages r and 2D - 1 - r; the order is played through for the times given.

    Weight gradients may be put off to fill waits before forwards, before input gradients on the way out, both or
    neither; each is played, then again with what every rank waited as its allowance, and the one with the shortest span
    is taken. At equal times it has ZB-V's bubble and memory from M = D on, where ZB-V's fixed order needs M = 2D - 1.

    Args:
        num_ranks: D.
        num_microbatches: M; fewer than D are allowed.
        limit: activations of a full rank that any rank may hold, >= D. Left at 0, D, which is 1F1B's.
        weight_share: M_W / M_B, the share of a micro-batch's activations that its W needs after its I has run.
        costs: for which the order is made, one entry for each of the 2D stages where they differ. Left out,
            T_F = T_I = T_W.

    Raises:
        ValueError: ``limit`` is below D.

    Example:
        >>> print(zb_v_auto(2, 2).to_text())
        0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1

    Source:
        Qi et al., arXiv 2401.10241, section 6, as in the authors' ``scheduler/zbv.py``.
    """
    options = ({"limit": limit} if limit else {}) | ({"weight_share": weight_share} if weight_share != 1 else {})
    name = write("zb_v_auto", options)
    require(name, not limit or limit >= num_ranks, f"got limit={limit:g}", f"A rank holds at least {num_ranks} here.")
    require(name, 0 < weight_share <= 1, f"got weight_share={weight_share:g}", "It is above 0 and at most 1.")
    costs = costs or Costs()
    orders = [
        order
        for played_for in ((costs,) if costs == Costs() else (costs, Costs()))  # equal times' order may be better
        for fills in _FILLS
        for order in _played(num_ranks, num_microbatches, 2 * (limit or num_ranks), weight_share, played_for, fills)
    ]
    made = (Schedule(name, rows, vee(num_ranks), num_microbatches) for rows in dict.fromkeys(orders))
    return min(made, key=lambda schedule: spans(schedule, costs))


_Rows = tuple[tuple[Action, ...], ...]


def _played(
    num_ranks: int, total: int, limit: float, weight_share: float, costs: Costs, fills: tuple[bool, bool]
) -> list[_Rows]:
    """The step played through, and again with what ranks waited before as their allowance while that shortens waits."""
    orders, allowed = [], [0.0] * num_ranks
    while True:
        game = _VGame(num_ranks, total, limit, weight_share, costs, fills, allowed)
        orders.append(game.play())
        waited = [rank.waited for rank in game.ranks]
        if len(orders) > 1 and max(waited) >= max(allowed):
            return orders
        allowed = waited


class _VRank:
    """One rank in play: its clock, what it holds, what it has done and when."""

    def __init__(self, place: int, num_ranks: int) -> None:
        self.place, self.stages = place, (place, 2 * num_ranks - 1 - place)
        self.clock = self.held = self.waited = 0.0
        self.actions: list[Action] = []
        self.owed: deque[int] = deque()  # stages of weight gradients that could run
        self.ends: dict[tuple[Kind, int], list[float]] = {(kind, leg): [] for kind in ("F", "I") for leg in (OUT, BACK)}
        self._done: dict[tuple[Kind, int], int] = {}

    def done(self, kind: Kind, leg: int) -> int:
        return len(self.ends[kind, leg])

    def stage(self, kind: Kind, leg: int) -> int:
        """Gradients go out along the stages that forwards come back on."""
        return self.stages[leg if kind == "F" else 1 - leg]

    def add(self, kind: Kind, stage: int, seconds: float, kept: float, arrival: float = 0.0) -> None:
        """Do an action, once its input is there."""
        start = max(self.clock, arrival)
        self.waited += start - self.clock if self.actions else 0.0
        self.clock, self.held = start + seconds, self.held + kept
        number = self._done[kind, stage] = self._done.get((kind, stage), -1) + 1
        self.actions.append(Action(kind, stage, number))


class _VGame:
    """A step played through with one set of choices."""

    def __init__(
        self, num_ranks: int, total: int, limit: float, weight_share: float, costs: Costs,
        fills: tuple[bool, bool], allowed: list[float],
    ) -> None:  # fmt: skip
        self.ranks = [_VRank(place, num_ranks) for place in range(num_ranks)]
        self.total, self.limit, self.costs, self.allowed = total, limit + 1e-9, costs, allowed
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        self._seconds = {(kind, s): costs.of(Action(kind, s, 0)) for kind in kinds for s in range(2 * num_ranks)}
        self.keeps: dict[Kind, float] = {"F": 1.0, "I": weight_share - 1.0, "W": -weight_share}
        self.fills_gradients, self.fills_forwards = fills

    def play(self) -> _Rows:
        """All ranks' rows."""
        self.first_forwards()
        self.level()
        for _ in range(2 * self.total):
            self.input_gradients()
            for rank in self.ranks:
                leg = self.next_forward(rank)
                if leg is not None:
                    self.forward(rank, leg)
        for rank in self.ranks:
            while rank.owed:
                self.weights(rank)
        return tuple(tuple(rank.actions) for rank in self.ranks)

    # -- what a rank does ----------------------------------------------------------------------------------------------

    def arrival(self, rank: _VRank, kind: Kind, leg: int) -> float | None:
        """When another rank's part of the rank's next F or I of a leg is there; None where it is not done, 0 where no
        other rank has one."""
        source = rank.place + (-1 if leg == OUT else 1)
        if not 0 <= source < len(self.ranks):
            return 0.0
        ends, number = self.ranks[source].ends[kind, leg], rank.done(kind, leg)
        return ends[number] + self.costs.hop(source, rank.place) if number < len(ends) else None

    def run(self, rank: _VRank, kind: Kind, leg: int) -> None:
        stage, arrival = rank.stage(kind, leg), self.arrival(rank, kind, leg)
        assert arrival is not None, "nothing runs before its input"
        rank.add(kind, stage, self.seconds(kind, stage), self.keeps[kind], arrival)
        rank.ends[kind, leg].append(rank.clock)
        if kind == "I":
            rank.owed.append(stage)

    def weights(self, rank: _VRank) -> None:
        stage = rank.owed.popleft()
        rank.add("W", stage, self.seconds("W", stage), self.keeps["W"])

    def seconds(self, kind: Kind, stage: int) -> float:
        return self._seconds[kind, stage]

    def fill(self, rank: _VRank, kind: Kind, leg: int, overfill: bool) -> None:
        """Weight gradients in the time that the rank would wait for its next F or I, and one more where it may: if it
        would wait longer than others have."""
        arrival = self.arrival(rank, kind, leg) or 0.0
        while rank.owed and rank.clock + self.seconds("W", rank.owed[0]) <= arrival:
            self.weights(rank)
        if overfill and rank.owed and arrival - rank.clock > self.slack(rank):
            self.weights(rank)

    def slack(self, rank: _VRank) -> float:
        """How much longer than this rank others have waited, or were allowed to."""
        most = max(other.waited for other in self.ranks)
        return max(most, max(self.allowed) - self.allowed[rank.place]) - rank.waited

    # -- before the first input gradient -------------------------------------------------------------------------------

    def first_forwards(self) -> None:
        """The first micro-batch out and back; meanwhile others go out as far as they are in time and fit."""
        for rank in self.ranks:
            self.run(rank, "F", OUT)
        for rank in reversed(self.ranks):
            back = self.arrival(rank, "F", BACK)
            assert back is not None
            while self.fits_before(rank, back):
                for other in self.ranks[: rank.place + 1]:
                    self.run(other, "F", OUT)
            self.run(rank, "F", BACK)

    def fits_before(self, rank: _VRank, moment: float) -> bool:
        """Whether another forward out is done by then, with room for what the rank has to hold until its gradient."""
        room = rank.held + 2 + 2 * rank.place <= self.limit
        in_time = rank.clock + self.seconds("F", rank.stages[OUT]) <= moment
        return room and in_time and rank.done("F", OUT) < self.total and rank is not self.ranks[-1]

    def level(self) -> None:
        """Forwards, out and back in turn, until each rank is as far as the one before it, which its gradient passes
        first."""
        leg = OUT
        for before, rank in zip(self.ranks, self.ranks[1:], strict=False):
            while self.is_behind(rank, before):
                for other in reversed(self.ranks[rank.place :]):
                    if other.done("F", leg) < self.total and self.arrival(other, "F", leg) is not None:
                        self.run(other, "F", leg)
                leg = 1 - leg

    def is_behind(self, rank: _VRank, before: _VRank) -> bool:
        count, ahead = (sum(r.done("F", leg) for leg in (OUT, BACK)) for r in (rank, before))
        return count < ahead or rank.done("F", BACK) <= before.done("F", BACK) < self.total

    # -- the rounds ----------------------------------------------------------------------------------------------------

    def input_gradients(self) -> None:
        """One on every rank; those on the way back first, from the last rank on."""
        legs = [self.next_gradient(rank) for rank in self.ranks]
        back = [rank for rank, leg in zip(self.ranks, legs, strict=True) if leg == BACK][::-1]
        out = [rank for rank, leg in zip(self.ranks, legs, strict=True) if leg == OUT]
        for rank, leg in [*((rank, BACK) for rank in back), *((rank, OUT) for rank in out)]:
            self.fill(rank, "I", leg, overfill=leg == BACK or self.fills_gradients)
            self.run(rank, "I", leg)

    def next_gradient(self, rank: _VRank) -> int:
        if rank.done("I", BACK) >= rank.done("I", OUT):
            return OUT
        waits = self.arrival(rank, "I", BACK) is None
        return OUT if waits and rank.done("I", OUT) < self.total else BACK

    def next_forward(self, rank: _VRank) -> int | None:
        """The leg of the rank's next forward: back where that can run."""
        if rank.done("F", BACK) >= self.total:
            return None
        if rank.done("F", OUT) > rank.done("F", BACK) and self.arrival(rank, "F", BACK) is not None:
            return BACK
        can_go_out = rank.done("F", OUT) < self.total and self.arrival(rank, "F", OUT) is not None
        return OUT if can_go_out else None

    def forward(self, rank: _VRank, leg: int) -> None:
        while rank.held + 1 > self.limit and rank.owed:
            self.weights(rank)
        self.fill(rank, "F", leg, overfill=self.fills_forwards)
        self.run(rank, "F", leg)
