"""What a worker of a parameter server does around the user's step: pushes what came of it, ticks, reads new weights.

    user's step (forward, backward, clipping)   gradient ----.                 weights
    its optimizer's step                                      '--> push ... pull --^

The one idea: the user's optimizer steps nowhere but on the servers; its groups tell the learning rate. Where a worker
waits for all others (an epoch's end, a checkpoint), it first sets its clock to the next multiple of `ERA`, so that
nobody who still has rows waits for it, and all go on from one clock. Left out: who the others are
(``parameter_server/trainer/coordination/run_coordinator_client.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.measure.staleness import Access
from lightning_parallel.parameter_server.filters import Filters
from lightning_parallel.parameter_server.from_torch import Rates, ServedOptimizer, groups_of
from lightning_parallel.parameter_server.messages import Coded
from lightning_parallel.parameter_server.table import Table
from lightning_parallel.parameter_server.trainer.staging import Staging
from lightning_parallel.parameter_server.trainer.versions import Versions
from lightning_parallel.parameter_server.transport.session import WorkerSession
from lightning_parallel.parameter_server.worker.island import Follower, Island
from lightning_parallel.parameter_server.worker.reading import Result

ERA = 1 << 32


class CountingFilters(Filters):
    """Filters that count the bytes which they let through."""

    sent = 0

    def encode(self, key: int, push: Tensor) -> Coded:
        coded = super().encode(key, push)
        self.sent += sum(part.nbytes for part in coded.parts)
        return coded


@dataclass(frozen=True)
class Pace:
    """How often a worker pushes and reads.

    Args:
        n_push: steps whose gradients are added up for one push.
        n_fetch: steps between two reads; in between the worker goes on with its own gradients.
    """

    n_push: int = 1
    n_fetch: int = 1


class ServerWorker:
    """One worker's training.

    Args:
        session: with the servers, started.
        table: of the optimizer's parameters.
        optimizer: the user's.
        rates: reads the learning rate of a push; None where workers run the optimizer and push what it changed.
        pace: how often it pushes and reads.
        rank: of the worker, for its notes.
        versions: where it notes what it reads and writes.
        era: how often workers have waited for each other, where it joins a run that is under way.
        island: that it reads for, too.
    """

    def __init__(
        self,
        session: WorkerSession | Follower,
        table: Table,
        optimizer: Optimizer,
        rates: Rates | None,
        pace: Pace,
        rank: int,
        versions: Versions,
        era: int = 0,
        island: Island | None = None,
    ) -> None:
        self.session, self.table, self.optimizer, self.rates = session, table, optimizer, rates
        self.pace, self.versions, self._rank = pace, versions, rank
        self.parameters = groups_of(optimizer)  # what the servers hold, by group
        self.staging = Staging(table, next((p.device for group in self.parameters for p in group), torch.device("cpu")))
        session.client.memory = self.staging.memory
        self._held = ServedOptimizer(optimizer, may_freeze=rates is None)
        self.era, self._steps, self._island = era, 0, island
        self.before_push: Callable[[int, int], None] = lambda number, seq: None  # with all gradients so far
        self.together: Callable[[], None] = lambda: None  # waits for the members of an island
        self._strayed = False  # whether steps were made here since the last read
        self._accrued: Tensor | None = None
        self._read: tuple[Result, int, float] | None = None  # the last read, at which clock, how long it took

    def pull(self) -> None:
        """Read the weights into the parameters, as fresh as the rule wants them."""
        began = time.perf_counter()
        result = self.session.pull()
        if self._island is not None:
            self._island.tell(result.vector)
        self._read = (result, self.session.client.clock or 0, time.perf_counter() - began)
        self.staging.into(result.vector, self.parameters)
        self._strayed = False

    @property
    def is_overwritten(self) -> bool:
        """Whether somebody has set the parameters to other values than were read, as averages of weights do."""
        if self._read is None or self._strayed:
            return False
        read = zip(self.parameters, self.table.unpack(self._read[0].vector), strict=True)
        pairs = (pair for group, values in read for pair in zip(group, values, strict=True))
        return not all(torch.equal(parameter, value.to(parameter)) for parameter, value in pairs)

    def refuse_written(self) -> None:
        """Raise for weights that a hook has written to: the servers hold them, and the next read would undo it.

        Raises:
            ValueError: parameters have other values than were read.
        """
        if self.is_overwritten:
            raise ValueError(
                "A hook has written to parameters (a clamp, load_state_dict, an average) since they were read from the"
                " servers, which hold the weights: the next read would undo it. Use ZeROStrategy(stage=1), which goes"
                " on from what hooks write; or do it before fit, or in a forward (torch.nn.utils.parametrize)."
            )

    def announce(self) -> None:
        """Before an island's gradients become one, tell how far a push of them comes: it is made by another member."""
        if (self._steps + 1) % self.pace.n_push == 0:
            self.before_push(self.session.client.worker or 0, self.session.client.seq + 1)

    def step(self, run: Callable[[], Any]) -> Any:
        """Run the user's step of the optimizer, and have the servers make it.

        Args:
            run: Lightning's step; calls ``optimizer.step``, or not if the step is skipped.
        """
        self._held.check()
        value, gradient = self._gradient_of(run) if self.rates is not None else self._change_of(run)
        self._steps += 1
        fetches = self._steps % self.pace.n_fetch == 0
        keeps = gradient is None and self.is_overwritten  # averaged weights, in a step without a backward
        self._strayed |= gradient is not None
        if gradient is not None:
            if not fetches and self.rates is not None:
                self._step_here(gradient)
            self._accrued = gradient if self._accrued is None else self._accrued.add_(gradient)
        self._push(self._steps % self.pace.n_push == 0)
        if fetches and not keeps:
            self.pull()
        return value

    def _gradient_of(self, run: Callable[[], Any]) -> tuple[Any, Tensor | None]:
        """Run a step in which the optimizer changes nothing; the gradients that it would have used."""
        found: list[Tensor] = []

        def take(closure: Callable[[], Any] | None = None) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            gradients = [[parameter.grad for parameter in group] for group in self.parameters]
            if any(gradient is not None for group in gradients for gradient in group):
                self.refuse_written()
                found.append(self.staging.out(self.staging.pack(gradients)))
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask
            return loss

        with replaced(self.optimizer, take):
            value = run()
        return value, found[0] if found else None

    def _change_of(self, run: Callable[[], Any]) -> tuple[Any, Tensor | None]:
        """Run a step with the optimizer here; what it changed."""
        self.refuse_written()
        before = self.staging.pack(self.parameters)
        called: list[bool] = []
        own = self.optimizer.step

        def note(*args: Any, **kwargs: Any) -> Any:
            called.append(True)
            return own(*args, **kwargs)

        with replaced(self.optimizer, note):
            value = run()
        return value, self.staging.out(self.staging.pack(self.parameters).sub_(before)) if called else None

    @torch.no_grad()
    def _step_here(self, gradient: Tensor) -> None:
        """Plain gradient descent on this worker's copy, until the next read replaces it."""
        groups = zip(self.optimizer.param_groups, self.table.unpack(gradient), strict=True)
        for (group, gradients), parameters in zip(groups, self.parameters, strict=True):
            for parameter, value in zip(parameters, gradients, strict=True):
                parameter.add_(value.to(parameter), alpha=-group["lr"])

    def _push(self, due: bool) -> None:
        """End the iteration: with all that has accrued if a push is due, else with a tick alone."""
        vector = self._accrued if due else None
        self._accrued = None if due else self._accrued
        filters = self.session.client.filters
        before = filters.sent if isinstance(filters, CountingFilters) else 0
        lr = self.rates.read() if self.rates is not None else None
        if self._accrued is None:
            self.before_push(self.session.client.worker or 0, self.session.client.seq + 1)
        self.session.push(vector, lr=lr, copy=False)
        whole = 0 if vector is None else vector.nbytes
        self._note(filters.sent - before if isinstance(filters, CountingFilters) else whole, whole)

    def _note(self, sent: int, whole: int) -> None:
        assert self._read is not None
        result, clock, seconds = self._read
        client = self.session.client
        if client.worker is None:
            return  # the first of its island does
        access = Access(
            self._rank, clock % ERA, clock - result.minimum, 0, None, seconds, sent, whole, result.vector.nbytes
        )  # fmt: skip
        self.versions.note(access, result.seqs, client.worker, client.seq)

    def pause(self) -> None:
        """Before waiting for all others: send what is left, and be ahead of everybody, with all replicas."""
        if self._accrued is not None:
            self.before_push(self.session.client.worker or 0, self.session.client.seq + 1)
            self.together()  # what a push holds is told by all members of an island before one of them makes it
            self._push(True)
        client = self.session.client
        self.era += 1
        client.clock = self.era * ERA - 1
        self.session.push(None)
        self.session.settle()

    def close(self, failed: bool) -> None:
        """Leave the job; nobody waits for this worker any more."""
        if failed:
            self.session.client.lost = True  # nothing is awaited
        self.session.close()


class replaced:
    """A context in which an optimizer's ``step`` is another function."""

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        self._optimizer, self._step = optimizer, step

    def __enter__(self) -> None:
        self._before = self._optimizer.__dict__.get("step")
        self._optimizer.step = self._step  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self._optimizer.step
        if self._before is not None:  # a scheduler's, which counts steps
            self._optimizer.step = self._before  # type: ignore[method-assign]
