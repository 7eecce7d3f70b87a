"""Where stages lie: one a rank, in loops, in a V; forwards or backwards along the ranks."""

from __future__ import annotations

Placement = dict[tuple[int, int], int]


def straight(num_ranks: int) -> Placement:
    """Rank r holds stage r.

    Example:
        >>> straight(2)
        {(0, 0): 0, (0, 1): 1}
    """
    return {(0, stage): stage for stage in range(num_ranks)}


def loop(num_ranks: int, v: int) -> Placement:
    """Rank r holds stages r, r + D, ..., v of them.

    Example:
        >>> loop(2, 2)
        {(0, 0): 0, (0, 1): 1, (0, 2): 0, (0, 3): 1}
    """
    return {(0, stage): stage % num_ranks for stage in range(num_ranks * v)}


def vee(num_ranks: int) -> Placement:
    """Rank r holds stages r and 2D - 1 - r: the second half comes back, so that the loss lies on the first rank.

    Example:
        >>> vee(2)
        {(0, 0): 0, (0, 1): 1, (0, 2): 1, (0, 3): 0}
    """
    return {(0, stage): min(stage, 2 * num_ranks - 1 - stage) for stage in range(2 * num_ranks)}


def both_ways(num_ranks: int, pairs: int = 1) -> Placement:
    """2 x ``pairs`` replicas: replica 2i goes up from rank i D / pairs and around, replica 2i + 1 comes down mirrored.

    Example:
        >>> both_ways(2)
        {(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 0}
    """
    placement = {}
    for pair in range(pairs):
        for stage in range(num_ranks):
            rank = (stage + pair * num_ranks // pairs) % num_ranks
            placement[2 * pair, stage] = rank
            placement[2 * pair + 1, num_ranks - 1 - stage] = rank
    return dict(sorted(placement.items()))
