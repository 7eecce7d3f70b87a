"""ZB-H1 and ZB-H2: backwards split into input and weight gradients, by hand.

The one idea: only the input gradient (I) is waited for by another rank; the weight gradient (W) can run wherever a rank
would stand idle. Left out: schedules made for measured times, see ``automatic``.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_parallel.pipeline.schedule import Action, Schedule
from lightning_parallel.pipeline.schedules.placement import straight


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with split backwards, in the memory that 1F1B has on its first rank.

    Round x of rank r is F_x, I_{x - (D - 1 - r)}, W_{x - (D - 1)}. The bubble is ``(D - 1)(T_F + T_I - T_W)`` of time,
    a third of 1F1B's at equal times. Rank r holds ``(D - r) M_B + r M_W``, with M_B the activations of a micro-batch
    and M_W what its weight gradient needs of them.

    Args:
        num_ranks: D.
        num_microbatches: M; fewer than D are allowed.

    Returns:
        At D = 4, row 1 starts ``1F0 1F1 | 1F2 1I0 1F3 1I1 1W0 ...``.

    Example:
        >>> print(zb_h1(2, 3).to_text())
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2.
    """
    return _lagged("zb_h1", num_ranks, num_microbatches, 1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Twice the warm-up of ZB-H1, which leaves no bubble within a rank's own span at equal times.

    Round x of rank r is F_x, I_{x - 2(D - 1 - r)}, W_{x - 2(D - 1)}. The bubble is ``(D - 1)(T_F + T_I - 2 T_W)`` of
    time by the definition ``span``. It becomes time won only if a rank's next step may start while others still work,
    which an optimizer that waits for all ranks (gradient norm) forbids. Rank r holds
    ``(2(D - r) - 1) M_B + 2r M_W``.

    Args:
        num_ranks: D.
        num_microbatches: M, 2D - 1 or more for the formula to hold; fewer are allowed.

    Example:
        >>> print(zb_h2(2, 3).to_text())
        0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3.
    """
    return _lagged("zb_h2", num_ranks, num_microbatches, 2)


def _lagged(name: str, num_ranks: int, num_microbatches: int, lag: int) -> Schedule:
    rows = tuple(tuple(_row(rank, num_ranks, num_microbatches, lag)) for rank in range(num_ranks))
    return Schedule(name, rows, straight(num_ranks), num_microbatches)


def _row(rank: int, num_ranks: int, num_microbatches: int, lag: int) -> Iterator[Action]:
    input_lag, weight_lag = lag * (num_ranks - 1 - rank), lag * (num_ranks - 1)
    for x in range(num_microbatches + weight_lag):
        if x < num_microbatches:
            yield Action("F", rank, x)
        if 0 <= x - input_lag < num_microbatches:
            yield Action("I", rank, x - input_lag)
        if x >= weight_lag:
            yield Action("W", rank, x - weight_lag)
