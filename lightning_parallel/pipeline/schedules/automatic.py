"""Zero bubble under a memory limit, for measured times: ZB-1p and ZB-2p.

The one idea: a rank's order is found by playing the step through (``game.py``). Three choices are open in this
(``Choices``), all eight combinations are played, and the one with the shortest span is taken. Left
out: the integer program of the paper, which its authors report to gain little over the heuristic.
"""

from __future__ import annotations

from itertools import product

from lightning_parallel.measure import bubble
from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.schedules.game import Choices, Game
from lightning_parallel.pipeline.schedules.placement import straight
from lightning_parallel.pipeline.schedules.spec import require, write
from lightning_parallel.pipeline.simulator import simulate


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
        Game(num_ranks, num_microbatches, limit, weight_share, played_for, Choices(*choices)).play()
        for played_for in ((costs,) if costs == Costs() else (costs, Costs()))  # equal times' order may be better
        for choices in product((True, False), repeat=3)
    ]
    made = (Schedule(name, rows, straight(num_ranks), num_microbatches) for rows in dict.fromkeys(orders))
    return min(made, key=lambda schedule: spans(schedule, costs))


def spans(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    """The longest span of a rank, then of all ranks together; equal ones are the same to nine digits."""
    timeline = simulate(schedule, costs)
    longest = max(bubble.span_seconds(timeline.rows))
    return float(f"{longest:.9g}"), float(f"{timeline.makespan:.9g}")
