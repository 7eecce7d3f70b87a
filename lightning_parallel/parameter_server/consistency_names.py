"""The rules of consistency by the names that papers gave them.

The one idea: a word and one number, the staleness, are enough to name a rule; what a word does not take is refused.
Left out: the rules (``consistency.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_parallel.parameter_server.consistency import (
    BSP,
    ESSP,
    SSP,
    Asynchronous,
    BoundedDelay,
    Consistency,
    DropOlderThan,
    Sandblaster,
)

_BOUNDED: dict[str, Callable[[int], Consistency]] = {"ssp": SSP, "essp": ESSP, "bounded_delay": BoundedDelay}
_FREE = ("async", "downpour")
NAMES = ("bsp", *_BOUNDED, *_FREE, "sandblaster")
DEFAULT_STALENESS = 3
_UNKNOWN = f"consistency={{!r}}: use one of {', '.join(NAMES)}, or a rule of server.consistency."


def rule_of(consistency: str | Consistency, staleness: int | None = None) -> Consistency:
    """A rule by its name.

    Args:
        consistency: "bsp"; "ssp", "essp" or "bounded_delay" with at most ``staleness`` clocks between workers at a
            read; "async" or "downpour", where pushes that are more than ``staleness`` pushes of others old are dropped
            if it is given; "sandblaster", where nobody pushes; or a rule, which is returned.
        staleness: see above; 3 where a name needs one.

    Raises:
        ValueError: there is no such name, or it takes no staleness.

    Example:
        >>> rule_of("ssp", 2), rule_of("async"), rule_of("downpour", 8)
        (SSP(staleness=2), Asynchronous(), DropOlderThan(staleness=8))
    """
    if isinstance(consistency, Consistency):
        if staleness is not None:
            raise ValueError(f"staleness={staleness} beside {consistency!r}: give it to the rule.")
        return consistency
    if not isinstance(consistency, str):
        raise ValueError(_UNKNOWN.format(consistency))
    if consistency in ("bsp", "sandblaster"):
        if staleness:
            raise ValueError(f'consistency="{consistency}" with staleness={staleness}: nothing is stale. Use "ssp".')
        return BSP() if consistency == "bsp" else Sandblaster()
    if consistency in _BOUNDED:
        return _BOUNDED[consistency](DEFAULT_STALENESS if staleness is None else staleness)
    if consistency in _FREE:
        return Asynchronous() if staleness is None else DropOlderThan(staleness)
    raise ValueError(_UNKNOWN.format(consistency))


def gap_bound(rule: Consistency) -> int | None:
    """Most clocks between a reader and the slowest worker at a read; None if nothing bounds them.

    Example:
        >>> gap_bound(SSP(2)), gap_bound(BSP()), gap_bound(Asynchronous())
        (2, 0, None)
    """
    probe = 1 << 20
    gap = probe - rule.need(probe)
    return gap if gap < probe else None
