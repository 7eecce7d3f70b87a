"""When the parameters of a pipeline's stages are whole: for a step, or for one action of one micro-batch.

The one idea: an action of a stage begins by asking for the stage's parameters and ends by letting go of them. Whoever
holds all of them for longer (a step that gathers once, an evaluation, a checkpoint) makes the asking free. All copies
of the model run the same actions in the same order, so that their gathers meet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning_parallel.zero.bucket import Bucket
from lightning_parallel.zero.collectives import Traffic
from lightning_parallel.zero.gathered import GatheredBucket


class Windows:
    """Opens and closes buckets by stage.

    Args:
        buckets: all of them; more may be added to the list.
        stages_of: the stages that use a bucket's parameters.
        traffic: counts what moves.
        waiting: a context entered while this process is blocked.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        stages_of: Callable[[Bucket], Collection[int]],
        traffic: Traffic,
        waiting: Callable[[str], AbstractContextManager[Any]] = lambda what: nullcontext(),
    ) -> None:
        self._buckets, self._stages_of, self._traffic, self._waiting = buckets, stages_of, traffic, waiting
        self._holds = 0
        self._works: list[Any] = []

    def begin(self, stage: int) -> None:
        """Begin to gather a stage's parameters."""
        self._works += [bucket.open(self._traffic) for bucket in self._of(stage)]

    def wait(self) -> None:
        """The parameters that were asked for are whole from now on."""
        works, self._works = self._works, []
        with self._waiting("the other copies' parts of the parameters"):
            for work in works:
                if work is not None:
                    work.wait()

    def end(self, stage: int) -> None:
        """An action of a stage is over: free its parameters, unless they are held."""
        if not self._holds:
            for bucket in self._of(stage):
                bucket.close()

    def hold(self) -> None:
        """Make all parameters whole, and keep them so until as many calls of `let_go`."""
        self._holds += 1
        self._works += [bucket.open(self._traffic) for bucket in self._all()]
        self.wait()

    def let_go(self) -> None:
        """Who held is done; the last one's going frees all."""
        self._holds -= 1
        if not self._holds:
            for bucket in self._all():
                bucket.close()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All parameters are whole inside."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def _all(self) -> list[GatheredBucket]:
        return [bucket for bucket in self._buckets if isinstance(bucket, GatheredBucket)]

    def _of(self, stage: int) -> list[GatheredBucket]:
        return [bucket for bucket in self._all() if stage in self._stages_of(bucket)]
