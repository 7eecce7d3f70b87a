"""How many ranks lie along each axis of a mesh: checked in one place, completed by the devices, drawn as a table.

The one idea: the degrees are all that tells one layout from another. One of them may be left out, it is then whatever
the number of processes leaves; the order says which axis has its ranks next to each other (the inner one, inside a
host) and which has them far apart (the outer one, between hosts). Left out: groups of ranks (``mesh.py``).

Source: Zheng et al., Alpa, arXiv 2201.12023, section 4: axes that talk much are mapped to the links within a host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

AXES = ("data", "pipeline", "tensor")


@dataclass(frozen=True)
class Degrees:
    """Sizes of the axes of a mesh.

    Args:
        sizes: ranks along each of `AXES`, 1 or more; at most one may be None, for all that is left.
        order: the axes, outermost first.

    Raises:
        ValueError: a size is no count, two are None, or the order is not one of `AXES`.

    Example:
        >>> Degrees({"data": None, "pipeline": 2, "tensor": 2}).axes(8)
        {'data': 2, 'pipeline': 2, 'tensor': 2}
    """

    sizes: Mapping[str, int | None]
    order: Sequence[str] = field(default=AXES)

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{axis}_parallel_size={size!r}: give a number of ranks, 1 or more, or None.")
        free = [f"{axis}_parallel_size" for axis, size in self.sizes.items() if size is None]
        if len(free) > 1:
            raise ValueError(f"{' and '.join(free)} are None. One size at most may be left to follow from the devices.")
        if not isinstance(self.order, Sequence) or sorted(map(str, self.order)) != sorted(AXES):
            raise ValueError(f"mesh_order={self.order!r}: give {', '.join(AXES)} in some order, outermost first.")

    def axes(self, world_size: int) -> dict[str, int]:
        """The size of every axis for so many processes, outermost first.

        Raises:
            ValueError: the sizes do not multiply to the number of processes.
        """
        given = math.prod(size for size in self.sizes.values() if size is not None)
        free = [axis for axis in self.order if self.sizes[axis] is None]
        if world_size % given or (not free and given != world_size):
            told = " x ".join(f"{axis} {self.sizes[axis] or '?'}" for axis in self.order)
            need = f"a multiple of {given}" if free else f"{given}"
            raise ValueError(
                f"The mesh {told} needs {need} ranks, but {world_size} processes were started. Change the sizes, or"
                " Trainer(devices=..., num_nodes=...)."
            )
        return {axis: self.sizes[axis] or world_size // given for axis in self.order}


def table(axes: Mapping[str, int]) -> str:
    """Which rank is where on a mesh, a line a rank.

    Example:
        >>> print(table({"data": 2, "pipeline": 1, "tensor": 2}))
        mesh: data 2 x pipeline 1 x tensor 2
        rank | data pipeline tensor
           0 |    0        0      0
           1 |    0        0      1
           2 |    1        0      0
           3 |    1        0      1
    """
    lines = ["mesh: " + " x ".join(f"{axis} {size}" for axis, size in axes.items()), f"rank | {' '.join(axes)}"]
    for rank, place in enumerate(product(*map(range, axes.values()))):
        numbers = " ".join(f"{number:>{len(axis)}}" for axis, number in zip(axes, place, strict=True))
        lines.append(f"{rank:>4} | {numbers}")
    return "\n".join(lines)
