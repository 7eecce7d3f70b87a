"""Who shares what: the ranks among which states are divided, and those that hold the same parts elsewhere."""

from __future__ import annotations

from typing import Any


class Ranks:
    """The ranks that share a bucket.

    Args:
        rank: this one's place among them.
        size: how many there are.
        group: their process group, None for the default one.
        replicas: the group of ranks that own the same part elsewhere, where a bucket is shared within a node only.
        num_replicas: how many own the same part.
        replica: this one's place among those.
        reductions: a group of the same ranks over which gradients are reduced, so that these need not keep pace with
            gathers; None is `group`.
    """

    def __init__(
        self, rank: int, size: int, group: Any = None, replicas: Any = None, num_replicas: int = 1, replica: int = 0,
        reductions: Any = None,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.group = rank, size, group
        self.reductions = group if reductions is None else reductions
        self.replicas, self.num_replicas, self.replica = replicas, num_replicas, replica
