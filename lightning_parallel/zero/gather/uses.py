"""Which buckets are whole as long as a stage's action, and which come and go with a block.

The one idea: what lies in a block comes and goes with its call, unless the first step of a kind did something else with
it: called the block again, out of order, or read its parameters beside its call. What lies in no block, or is read by
another stage of the rank, stays as long as the action.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import product

from torch import nn

from lightning_parallel.zero.native.bucket import Bucket
from lightning_parallel.zero.native.gathered_bucket import GatheredBucket


class Uses:
    """What stages use, and how.

    Args:
        buckets: all of them; more may be added to the list.
        stages_of, block_of: see `Windows`.

    Attributes:
        kept: blocks that are not at work in their calls alone.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        stages_of: Callable[[Bucket], Collection[int]],
        block_of: Callable[[Bucket], int | None],
    ) -> None:
        self._buckets, self._stages_of, self._block_of = buckets, stages_of, block_of
        self.kept: set[int] = set()
        self._beside: dict[int, set[int]] = {}  # by stage, places of buckets that it uses beside its own

    @property
    def buckets(self) -> list[GatheredBucket]:
        """Those that come and go; the number of one in this list is its place."""
        return [bucket for bucket in self._buckets if isinstance(bucket, GatheredBucket)]

    def of_action(self, stage: int) -> list[GatheredBucket]:
        """What is whole as long as a stage's action."""
        beside = self._beside.get(stage, ())
        return [b for n, b in enumerate(self.buckets) if n in beside or (self._uses(stage, b) and not self._comes(b))]

    def of_blocks(self, stage: int) -> dict[int, list[GatheredBucket]]:
        """What comes and goes with each of a stage's blocks, by number."""
        found: dict[int, list[GatheredBucket]] = {}
        for bucket in self.buckets:
            number = self._block_of(bucket)
            if number is not None and self._uses(stage, bucket) and self._comes(bucket):
                found.setdefault(number, []).append(bucket)
        return found

    def learn(
        self, found: Collection[int], read: Collection[tuple[int, int]], agree: Callable[[list[bool]], list[bool]]
    ) -> None:
        """A first step is over: keep whole for actions what it asked for.

        Args:
            found: blocks that were not called once, in order.
            read: stages, and places of buckets whose parameters they read outside of calls of blocks.
            agree: for each answer, whether any copy gives it; collective.
        """
        buckets = self.buckets
        blocks = sorted({number for bucket in buckets if (number := self._block_of(bucket)) is not None})
        stages = sorted({stage for bucket in buckets for stage in self._stages_of(bucket)})
        pairs = list(product(stages, range(len(buckets))))
        said = agree([block in found for block in blocks] + [pair in read for pair in pairs])
        self.kept |= {block for block, stray in zip(blocks, said, strict=False) if stray}
        for (stage, place), is_read in zip(pairs, said[len(blocks) :], strict=True):
            if is_read:
                self.keep(stage, place)

    def place_of(self, parameter: nn.Parameter) -> tuple[int, GatheredBucket]:
        """The bucket in which a parameter lies, behind its place."""
        return next((n, b) for n, b in enumerate(self.buckets) if any(p is parameter for p in b.parameters))

    def keep(self, stage: int, place: int) -> None:
        """A stage reads a bucket's parameters outside of calls of blocks: they stay as long as its actions."""
        bucket = self.buckets[place]
        number = self._block_of(bucket)
        if not self._uses(stage, bucket):
            self._beside.setdefault(stage, set()).add(place)
        elif number is not None:
            self.kept.add(number)

    def _uses(self, stage: int, bucket: Bucket) -> bool:
        return stage in self._stages_of(bucket)

    def _comes(self, bucket: Bucket) -> bool:
        number = self._block_of(bucket)
        return number is not None and number not in self.kept
