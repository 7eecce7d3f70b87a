"""How long the slices of a sequence should be, where later ones take longer: the dynamic program of TeraPipe."""

from __future__ import annotations

from collections.abc import Callable
from math import inf


def slice_lengths(length: int, num_stages: int, seconds: Callable[[int, int], float], unit: int = 1) -> list[int]:
    """The lengths of slices with which a sequence passes through a pipeline in the shortest time.

    A stage takes ``t_i = seconds(l_i, l_1 + .. + l_{i-1})`` for slice i, and all S stages take
    ``sum(t_i) + (S - 1) max(t_i)`` for the sequence.
    For every bound on ``max(t_i)`` the least sum follows slice by slice: of the first n tokens it is the least over the
    length k of their last slice of ``sum(first n - k tokens) + seconds(k, n - k)``.

    Args:
        length: T, tokens of a sequence.
        num_stages: S.
        seconds: time of a stage for a slice of so many tokens that attends to so many before it, as measured.
        unit: lengths are multiples of it; it divides T. The work grows with ``(T / unit) ** 4``, at the worst.

    Returns:
        One length a slice, for ``PipelineStrategy(schedule="terapipe", slices=...)``.

    Raises:
        ValueError: ``unit`` does not divide ``length``.

    Example:
        >>> slice_lengths(8, 4, lambda tokens, before: 1 + tokens)  # a slice costs 1 to begin
        [2, 2, 2, 2]
        >>> slice_lengths(16, 4, lambda tokens, before: 1 + tokens * (1 + before / 8))  # and more, the later it is
        [5, 3, 2, 2, 2, 1, 1]

    Source:
        Li et al., TeraPipe, arXiv 2102.07988, section 3.3.
    """
    if length < 1 or unit < 1 or length % unit:
        raise ValueError(f"slice_lengths(length={length}, unit={unit}): unit does not divide the length.")
    n = length // unit
    times = {(k, end): seconds(k * unit, (end - k) * unit) for end in range(1, n + 1) for k in range(1, end + 1)}
    best, lengths = inf, [n]
    for longest in sorted(set(times.values())):
        if (num_stages - 1) * longest >= best:
            break
        total, found = _least_sum(n, times, longest)
        if total + (num_stages - 1) * longest < best:
            best, lengths = total + (num_stages - 1) * longest, found
    return [k * unit for k in lengths]


def _least_sum(n: int, times: dict[tuple[int, int], float], longest: float) -> tuple[float, list[int]]:
    """The least sum of times with none above ``longest``, and the lengths that have it."""
    sums, last = [0.0] + [inf] * n, [0] * (n + 1)
    for end in range(1, n + 1):
        for k in range(1, end + 1):
            if times[k, end] <= longest and sums[end - k] + times[k, end] < sums[end]:
                sums[end], last[end] = sums[end - k] + times[k, end], k
    lengths = list[int]()
    while sums[n] < inf and sum(lengths) < n:
        lengths.insert(0, last[n - sum(lengths)])
    return sums[n], lengths
