"""One micro-batch at a time: what splitting a model over ranks gives before any pipelining."""

from __future__ import annotations

from lightning_parallel.pipeline.schedule import Action, Schedule


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each micro-batch goes forward through all stages and back before the next one starts.

    Of D ranks one works at a time: bubble ``(D - 1) / D`` whatever M is; each rank holds the activations of one
    micro-batch.

    Args:
        num_ranks: D, one stage a rank.
        num_microbatches: M.

    Returns:
        Row r is ``rF0 rB0 rF1 rB1 ...``.

    Example:
        >>> print(naive(2, 2).to_text())
        0F0 0B0 0F1 0B1
        1F0 1B0 1F1 1B1

    Source:
        Huang et al., GPipe, arXiv 1811.06965, figure 2(b).
    """
    rows = (
        tuple(action for m in range(num_microbatches) for action in (Action("F", stage, m), Action("B", stage, m)))
        for stage in range(num_ranks)
    )
    return Schedule("naive", tuple(rows), {(0, stage): stage for stage in range(num_ranks)}, num_microbatches)
