"""All forwards, then all backwards."""

from __future__ import annotations

from lightning_parallel.pipeline.schedule import Action, Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Every rank forwards all micro-batches, then backs them up in micro-batch order 0 to M-1.

    Bubble ``(D - 1) / (M + D - 1)``; each rank holds the activations of all M micro-batches. The backwards run in
    micro-batch order, as in ``torch.distributed.pipelining``; the paper and torchgpipe run them in reverse, which has
    the same bubble and the same peak, but adds up gradients in another order than 1F1B.

    Args:
        num_ranks: D, one stage a rank.
        num_microbatches: M.

    Returns:
        Row r is ``rF0 ... rF(M-1) rB0 ... rB(M-1)``.

    Example:
        >>> print(gpipe(2, 3).to_text())
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2

    Source:
        Huang et al., GPipe, arXiv 1811.06965, section 2.3 and figure 2(c).
    """
    microbatches = range(num_microbatches)
    rows = (
        tuple(Action("F", stage, m) for m in microbatches) + tuple(Action("B", stage, m) for m in microbatches)
        for stage in range(num_ranks)
    )
    return Schedule("gpipe", tuple(rows), {(0, stage): stage for stage in range(num_ranks)}, num_microbatches)
