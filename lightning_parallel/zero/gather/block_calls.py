"""At which node of a graph a backward comes to a block: whatever of the block's work the loss was made of.

The one idea: autograd numbers the nodes that a thread makes, and runs those that a backward reaches from the highest
number to the lowest. A block's call made the numbers between two counts, so the highest of them that the roots lead to
is the first of the block that runs; when it does, all blocks that were called later are done. Left out: graphs that are
made within a backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class BlockCalls:
    """The calls of blocks in a step, in order; none lies within another."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._blocks: list[int] = []

    def note(self, block: int, begin: int, end: int) -> None:
        """A block's call made the nodes of these numbers, if any."""
        if begin < end:
            self._begins.append(begin)
            self._ends.append(end)
            self._blocks.append(block)

    def forget(self) -> None:
        """A step begins."""
        for numbers in (self._begins, self._ends, self._blocks):
            numbers.clear()

    def first_nodes(self, roots: Sequence[Tensor | GradientEdge]) -> Iterator[tuple[int, Node]]:
        """Each block whose work the roots lead to, with the first of its nodes that runs."""
        first: dict[int, tuple[int, Node]] = {}
        begins, ends = self._begins, self._ends
        nodes = list({(r if isinstance(r, GradientEdge) else get_gradient_edge(r)).node: None for r in roots})
        seen = set(nodes)
        for node in nodes:  # grows as it goes
            number = node._sequence_nr()
            call = bisect_right(begins, number) - 1
            if call >= 0 and number < ends[call] and (call not in first or number > first[call][0]):
                first[call] = number, node
            for behind, _ in node.next_functions:
                if behind is not None and behind not in seen:
                    seen.add(behind)
                    nodes.append(behind)
        return ((self._blocks[call], node) for call, (_, node) in first.items())
