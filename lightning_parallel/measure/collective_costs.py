"""What a collective should take: latency, transfer and reduction added up, the alpha-beta-gamma model.

The one idea: a collective's time is a number of messages, a number of items sent and a number of items added, each
times what one of them costs here. Left out: congestion, topologies and overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Coefficients = tuple[float, float, float]  # messages, items sent, items added


@dataclass(frozen=True)
class Link:
    """What one message, one byte sent and one byte added cost, in seconds.

    Args:
        alpha: latency of a message.
        beta: transfer of a byte, the inverse of the bandwidth.
        gamma: reduction of a byte.
    """

    alpha: float
    beta: float
    gamma: float = 0.0


def _gathering(p: int, n: float) -> Coefficients:
    return p - 1, (p - 1) / p * n, 0.0


def _reduce_scatter(p: int, n: float) -> Coefficients:
    return p - 1, (p - 1) / p * n, (p - 1) / p * n


def _tree(p: int, n: float) -> Coefficients:
    return math.log2(p), (p - 1) / p * n, 0.0


def _after(
    first: Callable[[int, float], Coefficients], second: Callable[[int, float], Coefficients]
) -> Callable[[int, float], Coefficients]:
    def both(p: int, n: float) -> Coefficients:
        (a, b, c), (x, y, z) = first(p, n), second(p, n)
        return a + x, b + y, c + z

    return both


COLLECTIVES: dict[str, Callable[[int, float], Coefficients]] = {
    "reduce_scatter": _reduce_scatter,
    "all_gather": _gathering,
    "scatter": _tree,
    "gather": _tree,
    "all_reduce": _after(_reduce_scatter, _gathering),
    "broadcast": _after(_tree, _gathering),
    "reduce": _after(_reduce_scatter, _tree),
}


def estimate(collective: str, ranks: int, nbytes: float, link: Link) -> float:
    """Seconds that a collective takes on an otherwise idle network.

    Args:
        collective: a key of ``COLLECTIVES``.
        ranks: p, at least 1.
        nbytes: n, of the whole vector that is reduced, scattered or gathered.
        link: what messages and bytes cost.

    Raises:
        ValueError: the collective has no formula.

    Example:
        >>> estimate("all_gather", 4, 4e9, Link(alpha=0.0, beta=1e-9))
        3.0

    Source:
        The costs of minimum-spanning-tree and bucket algorithms: Chan et al., Collective communication: theory,
        practice, and experience, 2007.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"There is no formula for {collective!r}; there are {', '.join(COLLECTIVES)}.")
    messages, sent, added = COLLECTIVES[collective](ranks, nbytes)
    return link.alpha * messages + link.beta * sent + link.gamma * added
