"""One forward, one backward: GPipe's bubble with the memory of a pipeline's depth."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_parallel.pipeline.schedule import Action, Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Ranks alternate forwards and backwards as soon as the first backward can reach them.

    Rank r forwards ``min(M, D - 1 - r)`` micro-batches (warm-up), then alternates F and B until no forward is left,
    then drains the backwards. Bubble ``(D - 1) / (M + D - 1)`` as in GPipe; rank r holds the activations of at most
    ``min(M, D - r)`` micro-batches. M below D is allowed.

    Args:
        num_ranks: D, one stage a rank.
        num_microbatches: M.

    Returns:
        At D = 4, row 1 starts ``1F0 1F1 | 1F2 1B0 1F3 1B1 ...``.

    Example:
        >>> print(one_f_one_b(3, 4).to_text())
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    Source:
        Narayanan et al., PipeDream-Flush in arXiv 2006.09503; Fan et al., DAPPLE, arXiv 2007.01045 (early backward).
    """
    rows = (tuple(_row(stage, num_ranks - 1 - stage, num_microbatches)) for stage in range(num_ranks))
    return Schedule("1f1b", tuple(rows), {(0, stage): stage for stage in range(num_ranks)}, num_microbatches)


def _row(stage: int, warmup: int, num_microbatches: int) -> Iterator[Action]:
    for slot in range(num_microbatches + warmup):
        if slot < num_microbatches:
            yield Action("F", stage, slot)
        if slot >= warmup:
            yield Action("B", stage, slot - warmup)
