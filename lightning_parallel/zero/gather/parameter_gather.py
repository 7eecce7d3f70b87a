"""When the parameters of a pipeline's stages are whole: for a step, or block by block in an action of one micro-batch.

The one idea: an action of a stage begins by asking for the stage's parameters and ends by letting go of them. What lies
in blocks is whole while its block is at work and no longer: a forward says which block it calls, hooks on the graph of
what a block returned say which one a backward has come to. What a forward reads beside all that is gathered
there and then. Whoever holds all of them for longer (a step that gathers once, an evaluation, a checkpoint) makes the
asking free. All copies of the model run the same actions in the same order, so that their gathers meet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from lightning_parallel.zero.closed_parameters import lend_in_forward
from lightning_parallel.zero.collectives import Traffic
from lightning_parallel.zero.gather.block_calls import BlockCalls
from lightning_parallel.zero.gather.irregular_blocks import IrregularBlocks
from lightning_parallel.zero.gather.prefetch_order import PrefetchOrder, Waiting
from lightning_parallel.zero.native.bucket import Bucket
from lightning_parallel.zero.native.gathered_bucket import GatheredBucket


class ParameterGather:
    """Opens and closes buckets by stage, and within a stage by block.

    Args:
        buckets: all of them; more may be added to the list.
        stages_of: the stages that use a bucket's parameters.
        traffic: counts what moves.
        waiting: a context entered while this process is blocked.
        block_of: the number of the block in which all of a bucket's parameters lie, None where there is none; such
            buckets are whole as long as an action is.
        meet: called where a forward reads a parameter beside its block's call, with its name, its bucket's place and
            the number of this action; raises unless all copies do so at that place. Collective.

    Attributes:
        passed: called with a stage's block when its backward is over; None while nobody asks.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        stages_of: Callable[[Bucket], Collection[int]],
        traffic: Traffic,
        waiting: Waiting = lambda what: nullcontext(),
        block_of: Callable[[Bucket], int | None] = lambda bucket: None,
        meet: Callable[[str, int, int], None] = lambda name, place, action: None,
    ) -> None:
        self._traffic, self._waiting, self._meet = traffic, waiting, meet
        self._stage = self._actions = self._holds = 0  # the action's stage, and how many have begun
        self._walk: PrefetchOrder | None = None
        self._strays: IrregularBlocks | None = None
        self._uses = Uses(buckets, stages_of, block_of)
        self._asked: list[GatheredBucket] = []  # what is whole as long as the action that runs
        self._calls = BlockCalls()
        self.passed: Callable[[int], None] | None = None

    # -- actions -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step begins."""
        self._calls.forget()

    def begin(self, stage: int, forward: bool) -> None:
        """Begin to gather what an action of a stage needs at first."""
        if self._strays is not None:
            self._strays.begin(stage, forward)
        self._stage, self._actions = stage, self._actions + 1
        lend_in_forward(self._lend if forward else None)
        self._asked = self._uses.of_action(stage)
        for bucket in self._asked:
            bucket.open(self._traffic)
        self._begin_walk(stage, forward)

    @property
    def is_held(self) -> bool:
        """Whether all parameters are whole at the moment, whatever is asked for."""
        return self._holds > 0

    @property
    def is_walking(self) -> bool:
        """Whether blocks come and go at the moment."""
        return self._walk is not None

    def wait(self) -> None:
        """The parameters that were asked for are whole from now on, but for blocks whose turn is to come."""
        with self._waiting("the other copies' parts of the parameters"):
            for bucket in self._asked:
                bucket.arrive()
        if self._walk is not None:
            self._walk.arrive()

    def turn(self, stage: int) -> None:
        """A forward within a backward's action is over, and the backward begins."""
        if self._strays is not None:
            self._strays.end()
        lend_in_forward(None)
        self._finish_walk()
        self._begin_walk(stage, forward=False)

    def expect(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        """A backward is about to run from these roots: it is to say when it comes to a block."""
        if self._walk is not None:
            for block, node in self._calls.first_nodes(roots):
                node.register_prehook(partial(self._come_to, block))

    def end(self, stage: int) -> None:
        """An action of a stage is over: free its parameters, unless they are held."""
        self._finish_walk()
        if self._strays is not None:
            self._strays.end()
        lend_in_forward(None)
        if not self._holds:
            for bucket in self._asked:  # the way through the blocks has closed the others
                bucket.close()

    def abandon(self) -> None:
        """A step does not come to its end: what is read from here on is lent nothing."""
        if self._strays is not None:
            self._strays.end()
        lend_in_forward(None)

    def _lend(self, parameter: nn.Parameter) -> None:
        """A forward reads a closed parameter: make it whole, as long as this stage's actions are from now on.

        Raises:
            ValueError: another copy reads another one, or elsewhere.
        """
        place, bucket = self._uses.place_of(parameter)
        if not bucket.is_open:
            self._meet(bucket.name_of(parameter), place, self._actions)
            self._uses.keep(self._stage, place)
            self._asked.append(bucket)
            bucket.open(self._traffic)
        with self._waiting("the other copies' parts of the parameters"):
            bucket.arrive()

    def _begin_walk(self, stage: int, forward: bool) -> None:
        if self._holds:
            return
        buckets = self._uses.of_blocks(stage)
        passed = self.passed if not forward and self.passed is not None else lambda block: None
        self._walk = PrefetchOrder(sorted(buckets, reverse=not forward), buckets, self._traffic, self._waiting, passed)

    def _finish_walk(self) -> None:
        walk, self._walk = self._walk, None
        if walk is not None:
            walk.finish()

    # -- blocks --------------------------------------------------------------------------------------------------------

    @contextmanager
    def at_work(self, block: int, again: bool) -> Iterator[Callable[[Any], None]]:
        """Around a block's call; what it gives is to be called with what the block returned, when it computes again.

        Args:
            block: its number.
            again: whether a backward runs, which computes something again.

        Raises:
            ValueError: the block's turn is over.
        """
        walk, strays, since = self._walk, self._strays, _get_sequence_nr()
        if strays is not None:
            strays.enter(block)
        if walk is not None and again:
            walk.need(block)
        elif walk is not None:
            self._enter(walk, block)
        try:
            yield lambda result: self._watch(block, result, since)
        finally:
            if strays is not None:
                strays.leave()
        if walk is not None and not again:
            walk.leave(block)
            if block not in self._uses.kept:
                self._calls.note(block, since, _get_sequence_nr())

    def _watch(self, block: int, result: Any, since: int) -> None:
        """Have a backward within the backward say when it comes to a block: before the nodes that made its result."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                for view in (tensor, tensor._base):  # a view's own node goes where somebody writes into it
                    node = None if view is None else view.grad_fn
                    if node is not None and node._sequence_nr() >= since:
                        node.register_prehook(partial(self._come_to, block))

    def _come_to(self, block: int, gradients: Any) -> None:
        if self._walk is not None:
            self._enter(self._walk, block)

    def _enter(self, walk: PrefetchOrder, block: int) -> None:
        if not walk.enter(block):
            raise ValueError(
                f"The step uses the parameters of block {block} again when the blocks behind it have had their turn,"
                ' which it did not when its kind first ran; zero_stage=3 with gather="microbatch" has freed them. Use'
                ' gather="step".'
            )

    def lends(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory of parameters that comes and goes."""
        return tensor.untyped_storage()._cdata in {b.flat.untyped_storage()._cdata for b in self._all()}

    # -- what blocks do ------------------------------------------------------------------------------------------------

    @contextmanager
    def learning(self, agree: Callable[[list[bool]], list[bool]]) -> Iterator[None]:
        """Around the first step of a kind, for which all is held: which blocks are called in one order, and used there
        alone? Others are whole as long as their stage's actions are, from then on.

        Args:
            agree: for each answer, whether any copy says so; collective.
        """
        places = {parameter: n for n, bucket in enumerate(self._all()) for parameter in bucket.parameters}
        self._strays = strays = IrregularBlocks(places)
        try:
            with self.whole(), strays:
                yield
        finally:
            self._strays = None
        self._uses.learn(strays.found, strays.read, agree)

    # -- all of them ---------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Make all parameters whole, and keep them so until as many calls of `let_go`."""
        self._holds += 1
        for bucket in self._all():
            bucket.open(self._traffic)
        with self._waiting("the other copies' parts of the parameters"):
            for bucket in self._all():
                bucket.arrive()

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
        return self._uses.buckets


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
