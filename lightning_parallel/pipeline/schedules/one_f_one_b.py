"""One forward, one backward: GPipe's bubble with the memory of a pipeline's depth."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_parallel.pipeline.schedule import Action, Schedule
from lightning_parallel.pipeline.schedules.placement import straight
from lightning_parallel.pipeline.schedules.spec import require, write


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
    return _schedule("1f1b", [num_ranks - rank for rank in range(num_ranks)], num_microbatches)


def dapple(num_ranks: int, num_microbatches: int, policy: int = 1, limit: int = 0) -> Schedule:
    """1F1B with one of DAPPLE's two warm-ups, under a limit of micro-batches in flight.

    Rank r forwards K_r micro-batches before its first backward: ``min(D - r, limit)`` by policy 1, which is 1F1B, and
    ``min(2(D - r) - 1, limit)`` by policy 2, which hides transfers that take up to as long as an action behind the
    forwards of others, for nearly twice the memory. Without communication the bubble of both is 1F1B's; a limit below
    D makes it larger.

    Args:
        num_ranks: D, one stage a rank.
        num_microbatches: M.
        policy: 1 or 2.
        limit: most micro-batches that a rank holds. Left at 0, as many as the policy takes.

    Raises:
        ValueError: ``policy`` is neither, or ``limit`` is negative.

    Example:
        >>> print(dapple(2, 4, policy=2).to_text())
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    Source:
        Fan et al., DAPPLE, PPoPP 2021, arXiv 2007.01045; the two policies as quoted by others (UNVERIFIED in the
        paper).
    """
    name = write("dapple", ({"policy": policy} if policy != 1 else {}) | ({"limit": limit} if limit else {}))
    require(name, policy in (1, 2), f"got policy={policy}", "Use 1 or 2.")
    require(name, limit >= 0, f"got limit={limit}", "Use 1 or more, or 0 for no limit.")
    distances = (num_ranks - rank for rank in range(num_ranks))
    wanted = [distance if policy == 1 else 2 * distance - 1 for distance in distances]
    return _schedule(name, [min(count, limit or count) for count in wanted], num_microbatches)


def _schedule(name: str, in_flight: list[int], num_microbatches: int) -> Schedule:
    rows = (tuple(_row(stage, count - 1, num_microbatches)) for stage, count in enumerate(in_flight))
    return Schedule(name, tuple(rows), straight(len(in_flight)), num_microbatches)


def _row(stage: int, warmup: int, num_microbatches: int) -> Iterator[Action]:
    for slot in range(num_microbatches + warmup):
        if slot < num_microbatches:
            yield Action("F", stage, slot)
        if slot >= warmup:
            yield Action("B", stage, slot - warmup)
