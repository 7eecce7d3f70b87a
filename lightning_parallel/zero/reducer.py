"""Reduces gradients while the backward still runs, bucket by bucket, in one order on all ranks.

The one idea: a bucket is reduced as soon as its last gradient is made and all buckets before it are on their way. At
the end of the backward the rest follows, with zeros for gradients that this rank did not make; so ranks that take
different branches never wait for each other in different places. Whether a parameter has a gradient at all is agreed on
the host: nobody's gradient is None, as in one process, and the optimizer leaves it alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_parallel.zero.collectives import Traffic
from lightning_parallel.zero.native.bucket import Bucket
from lightning_parallel.zero.round_agreement import agree_on_round
from lightning_parallel.zero.sharded_gradient import add_to_reduce

Waiting = Callable[[str], AbstractContextManager[Any]]
_IN_FLIGHT = 2  # buckets whose gradients are on their way at a time; their vectors are freed when they have arrived


class Reducer:
    """Hooks on parameters, and what they set off.

    Args:
        traffic: counts what moves.
        group: a process group for host tensors, of all ranks that see different rows.
        waiting: a context entered while this process is blocked.
        name_of: names a parameter in errors.

    Attributes:
        sync: False while gradients accumulate that stay whole (stage 1).
        rounds: backwards that were reduced so far, the same number on all ranks.
    """

    def __init__(
        self,
        traffic: Traffic,
        group: Any = None,
        waiting: Waiting = lambda what: nullcontext(),
        name_of: Callable[[nn.Parameter], str] = lambda parameter: "a parameter",
    ) -> None:
        self.traffic, self.group, self.waiting, self._name_of = traffic, group, waiting, name_of
        self.sync, self.rounds = True, 0
        self.buckets: list[Bucket] = []
        self._order: list[int] = []
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self._open = self._agreed_order = False
        self._late = 0  # ranks that have more to reduce
        self._ahead: dict[int, list[bool]] = {}  # of buckets that were sent, which parameters had a gradient
        self._reset()

    def add(self, buckets: Sequence[Bucket]) -> None:
        """More buckets to reduce, in the order in which a backward fills them."""
        self._order += range(len(self.buckets), len(self.buckets) + len(buckets))
        self.buckets += buckets
        self._reset()

    def attach(self) -> None:
        """Hook the parameters that need a gradient and have no hook yet."""
        for number, bucket in enumerate(self.buckets):
            for index, parameter in enumerate(bucket.parameters):
                if parameter.requires_grad and parameter not in self._handles:
                    hook = partial(self._made, number, index)
                    self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward; gradients are reduced when it ends. One outside of it is noticed by the hooks."""
        self.attach()
        self._start()
        try:
            yield
        except BaseException:
            self._open = False
            raise
        self.finish()

    def finish(self) -> None:
        """Reduce what is not on its way, wait for all, and put gradients in place."""
        if not self._open:
            return
        self._open = False
        if not self.sync and all(bucket.keeps_gradients for bucket in self.buckets):
            for number in self._active:
                self.buckets[number].hold()
            return
        self._launch(everything=True)
        made = self._agree()
        for number in self._active:
            self.buckets[number].deliver(made[number], self.traffic)
        self.rounds += 1

    def catch_up(self) -> None:
        """Reduce gradients that were kept whole until now, or that no backward made."""
        before, self.sync = self.sync, True
        self._start()
        self.finish()
        self.sync = before

    def send(self, number: int) -> None:
        """Begin to reduce a bucket whose gradients are made; `reduce_made` ends it."""
        self._ahead[number] = self.buckets[number].reduce(self.traffic)
        self._flight.append(self.buckets[number])

    def settle(self) -> None:
        """Wait for all but the last few buckets that were sent: what was sent of them is freed."""
        with self.waiting("the other ranks' gradients"):
            while len(self._flight) > _IN_FLIGHT:
                self._flight.popleft().wait()

    def reduce_made(self, order: Sequence[int]) -> None:
        """Reduce all gradients, in an order of bucket numbers that begins with those that were sent ahead. Who has
        which is agreed first, so that ranks that have come to a pause meanwhile are told so."""
        ahead, self._ahead = self._ahead, {}
        late = {number: self.buckets[number].set_aside() for number in ahead}
        is_late = any(gradient is not None for gradients in late.values() for gradient in gradients)
        self._start()
        self._open = False
        self._active[:] = [number for number in order if self._missing[number] and number not in ahead]
        made = [ahead[number] if number in ahead else bucket.made() for number, bucket in enumerate(self.buckets)]
        with self.waiting("the other ranks' gradients"):
            made = self._vote(made, pausing=False, late=is_late)
        more = self._late
        self._launch(everything=True)
        for number in [*ahead, *self._active]:
            self.buckets[number].deliver(made[number], self.traffic)
        self.rounds += 1
        for number, gradients in late.items():
            for parameter, gradient in zip(self.buckets[number].parameters, gradients, strict=True):
                if gradient is not None and parameter.grad is not None:
                    add_to_reduce(parameter.grad, gradient)
                elif gradient is not None:
                    parameter.grad = gradient
        if more:
            self.reduce_made(order)

    def meet(self) -> None:
        """Before a step whose collectives all ranks have to share: none of them has come to a pause.

        Raises:
            ValueError: one has.
        """
        with self.waiting("the other ranks, to begin a step"):
            self._vote([[False] * len(bucket.parameters) for bucket in self.buckets], pausing=False)

    def pause(self) -> None:
        """Where an epoch or an evaluation begins: all ranks have to be there.

        Raises:
            ValueError: other ranks still have batches to train on.
        """
        with self.waiting("the other ranks, where an epoch or an evaluation begins"):
            self._vote([[False] * len(bucket.parameters) for bucket in self.buckets], pausing=True)

    # -- a round: from the first gradient to the last ------------------------------------------------------------------

    def _reset(self) -> None:
        self._active: list[int] = []
        self._missing: list[int] = [0] * len(self.buckets)
        self._seen: set[tuple[int, int]] = set()
        self._next = 0
        self._launched: set[int] = set()
        self._flight: deque[Bucket] = deque()
        self._present = [[False] * len(bucket.parameters) for bucket in self.buckets]
        self._completed: list[int] = []

    def _start(self) -> None:
        self._reset()
        self._open = True
        self._missing = [bucket.expected for bucket in self.buckets]
        self._active = [number for number in self._order if self._missing[number]]

    def _made(self, number: int, index: int, parameter: nn.Parameter) -> None:
        """A backward has made a gradient."""
        if not self._open:  # a backward that nobody announced
            self._start()
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if number in self._launched:
            raise RuntimeError(
                f"A backward made the gradient of {self._name_of(parameter)} again when it was reduced already. A"
                " weight that reentrant checkpoints share does that: use torch.utils.checkpoint(use_reentrant=False)."
            )
        if (number, index) in self._seen:
            return
        self._seen.add((number, index))
        self._missing[number] -= 1
        if not self._missing[number]:
            self._completed.append(number)
            if self.sync or not self.buckets[number].keeps_gradients:
                self._launch()

    def _launch(self, everything: bool = False) -> None:
        while self._next < len(self._active):
            number = self._active[self._next]
            if self._missing[number] and not everything:
                return
            if len(self._flight) == _IN_FLIGHT:
                with self.waiting("the other ranks' gradients"):
                    self._flight.popleft().wait()
            bucket = self.buckets[number]
            self._present[number] = bucket.reduce(self.traffic)
            self._launched.add(number)
            self._flight.append(bucket)
            self._next += 1

    # -- agreements on the host ----------------------------------------------------------------------------------------

    def _agree(self) -> list[list[bool]]:
        """For each parameter, whether any rank has a gradient."""
        with self.waiting("the other ranks' gradients"):
            made = self._vote(self._present, pausing=False)
            if not self._agreed_order:
                self._agree_order()
        return made

    def _agree_order(self) -> None:
        """From now on reduce buckets in the order in which rank 0's first backward filled them."""
        self._agreed_order = True
        rest = [number for number in self._order if number not in self._completed]
        order = torch.tensor([*self._completed, *rest], dtype=torch.int64)
        source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.broadcast(order, source, group=self.group)
        self._order = order.tolist()

    def _vote(self, made: list[list[bool]], pausing: bool, late: bool = False) -> list[list[bool]]:
        answers, self._late = agree_on_round(made, late, pausing, self.rounds, self.group)
        return answers
