"""What the papers promise of the named schedules, to stand beside what is simulated and measured."""

from __future__ import annotations

FORMULAS = {"naive": "(D-1)/D", "gpipe": "(D-1)/(M+D-1)", "1f1b": "(D-1)/(M+D-1)"}


def bubble_formula(name: str, num_ranks: int, num_microbatches: int) -> float | None:
    """Closed form of the bubble at equal costs and no communication, or None where there is none.

    ``(D - 1) / (M + D - 1)`` for GPipe [1] and 1F1B [2], ``(D - 1) / D`` for one micro-batch at a time. ``idle`` and
    ``span`` agree for these: rank 0 is the first to start and the last to end.

    Args:
        name: of the schedule.
        num_ranks: D.
        num_microbatches: M.

    Example:
        >>> bubble_formula("gpipe", 4, 9)
        0.25

    Source:
        [1] Huang et al., GPipe, arXiv 1811.06965, section 2.3. [2] Narayanan et al., arXiv 2104.04473, section 2.2,
        where it is divided by the ideal instead of the total time: ``(D - 1) / M``.
    """
    if name not in FORMULAS:
        return None
    micro_batches_in_flight = 1 if name == "naive" else num_microbatches
    return (num_ranks - 1) / (micro_batches_in_flight + num_ranks - 1)


def peak_formula(name: str, num_ranks: int, num_microbatches: int) -> list[int] | None:
    """Closed form of the activations each rank holds, in activations of one stage, or None where there is none.

    M for GPipe, ``min(M, D - r)`` on rank r for 1F1B, 1 for one micro-batch at a time.

    Example:
        >>> peak_formula("1f1b", 4, 8)
        [4, 3, 2, 1]

    Source:
        Narayanan et al., arXiv 2104.04473, section 2.2.1; Qi et al., arXiv 2401.10241, table 2.
    """
    if name not in FORMULAS:
        return None
    by_name = {"naive": 1, "gpipe": num_microbatches}
    return [by_name.get(name, min(num_microbatches, num_ranks - rank)) for rank in range(num_ranks)]
