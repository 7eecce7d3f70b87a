"""`torch._foreach_*` operations on lists that hold tensors of several kinds.

The one idea: such an operation is the same operation at every position, so it may be taken apart. What averages the
weights of a model gets all of them in one list, this stage's own and the stand-ins of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def positions_without(args: Sequence[Any], found_in: Callable[[Any], Any]) -> list[int]:
    """The positions at which `found_in` finds nothing in any of the lists among the arguments.

    Example:
        >>> positions_without(([1, "a", 3], 0.5, [4, 5, "b"]), lambda column: "a" in column or "b" in column)
        [0]
    """
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    return [i for i, column in enumerate(zip(*lists, strict=False)) if not found_in(column)]


def apart(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], first: Sequence[int]) -> Any:
    """The operation at the positions `first`, and in a second call at all others.

    Example:
        >>> apart(lambda xs, ys, times: [times * (x + y) for x, y in zip(xs, ys)], ([1, 2], [3, 4], 10), {}, [1])
        [40, 60]
    """
    count = len(next(arg for arg in args if isinstance(arg, (list, tuple))))
    results: list[Any] = [None] * count
    for positions in (first, [i for i in range(count) if i not in set(first)]):
        part = [[arg[i] for i in positions] if isinstance(arg, (list, tuple)) else arg for arg in args]
        for i, result in zip(positions, (func(*part, **kwargs) if positions else None) or (), strict=False):
            results[i] = result
    return results if any(result is not None for result in results) else None
