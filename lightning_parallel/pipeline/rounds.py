"""Which stages a step calls, and how often: found out on one micro-batch, before a schedule runs.

The one idea: a stage can go on behind a call of a later stage if it knows the shapes of what that returns. So a
micro-batch goes through all stages, again and again; in each round a stage runs the step until it would need what a
unit of another stage returns for the first time, and after the round all stages tell what their units returned. When
the last stage comes to the end of the step, the others know how often each calls the next. From then on a stage runs
all its calls in one forward, and what they hand on travels together; a schedule never knows. Nothing is kept of the
rounds but descriptions. Left out: a stage that needs what a later one made of its earlier call; it is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_parallel.pipeline.boundary import Arrival, Contract, Departure, Inbox, undescribable
from lightning_parallel.pipeline.calls import Going
from lightning_parallel.pipeline.cut import Cut
from lightning_parallel.pipeline.phantom import Leaf, PhantomError
from lightning_parallel.pipeline.schedule import Action
from lightning_parallel.pipeline.seat import Seat
from lightning_parallel.pipeline.stage import Place, StageRun, UnitOutputs
from lightning_parallel.pipeline.values import TensorMeta, describe
from lightning_parallel.pipeline.work import StepWork

Values = dict[Place, tuple[TensorMeta, bool]]


@dataclass
class Passed:
    """What one stage came to in a round.

    Attributes:
        record: what its units return, by call.
        values: what it can hand on, and what of that carries a gradient.
        going: how far it went.
        needed, wanted, by_position: what it lacked, see `StageRun`.
        has_ended: whether the step ran to its end.
        stopped: why it did not go on, if something may be wrong.
    """

    record: UnitOutputs
    values: Values
    going: Going
    needed: tuple[int, ...]
    wanted: tuple[Leaf, ...]
    by_position: frozenset[Leaf]
    has_ended: bool
    stopped: str


class Rounds:
    """Finds out how often a step calls each stage.

    Args:
        cut: the model.
        seats: the stages of this rank, by (replica, stage).
        all_gather: gives every rank's object to every rank of the copy.
        fail: see `Engine`.
    """

    def __init__(
        self,
        cut: Cut,
        seats: Mapping[tuple[int, int], Seat],
        all_gather: Callable[[Any], list[Any]],
        fail: Callable[[Exception, Action], Exception],
    ) -> None:
        self.cut, self.seats, self._all_gather, self._fail = cut, seats, all_gather, fail
        self._known: set[Hashable] = set()

    def new(self, signatures: Sequence[Hashable]) -> list[int]:
        """The first micro-batch of every signature that was not asked about."""
        return [signatures.index(s) for s in dict.fromkeys(signatures) if s not in self._known]

    def forget_agreements(self) -> None:
        """A step went through in vain: what it agreed on is wrong. On all ranks."""
        self._known.clear()
        if self.cut.graphs is not None:
            self.cut.graphs.is_on = False  # it was no step after which libraries have chosen kernels
        for seat in self.seats.values():
            seat.forget_agreements()

    def learn(self, work: StepWork, microbatch: int) -> None:
        """Find out about the signature of a micro-batch; all ranks of the copy call it.

        Raises:
            PhantomError: the step cannot be run in stages as it is written.
        """
        known: UnitOutputs = {}
        with self._without_graphs():
            passed = self._round(work, microbatch, known)
            while not passed[max(passed)].has_ended:
                new = {name: made for of in passed.values() for name, made in of.record.items() if name not in known}
                if not new:
                    self._refuse(passed, microbatch)
                known = {**known, **new}
                passed = self._round(work, microbatch, known)
        known = {**known, **{name: made for of in passed.values() for name, made in of.record.items()}}
        self._agree(work.signatures[microbatch], contracts(passed, known))
        self._known.add(work.signatures[microbatch])

    def _round(self, work: StepWork, microbatch: int, known: UnitOutputs) -> dict[int, Passed]:
        """One round of all stages."""
        mine = {}
        for (replica, stage), seat in sorted(self.seats.items()):
            if replica == 0:
                try:
                    mine[stage] = self._pass(seat, work, microbatch, known)
                except Exception as error:
                    raise self._fail(error, Action("F", stage, microbatch)) from error
        return {stage: of for ranks in self._all_gather(mine) for stage, of in sorted(ranks.items())}

    def _pass(self, seat: Seat, work: StepWork, microbatch: int, known: UnitOutputs) -> Passed:
        """One round of one stage."""
        skips = any(s.departure is not None and s.departure.skip_connections for s in self.seats.values())
        inputs = {} if seat.arrival is None else _take(seat.arrival, seat.stage, work.training)
        key = self.cut.streams.begin(work.batch, microbatch)
        run = StageRun(
            self.cut, seat.stage, microbatch, key, inputs, known, learn=True, again=True,
            keep=[] if skips else None, going=Going(finding=True),
        )  # fmt: skip
        stopped = ""
        try:
            run.forward(work.steps[microbatch])
        except PhantomError as error:
            if run.is_last or not run.exits:
                raise
            stopped = str(error)  # maybe behind all that other stages wait for
        try:
            pickle.dumps(run.record)
        except Exception as error:
            raise PhantomError(undescribable(seat.stage, "the other stages", error)) from error
        handed = {p: leaf for p, leaf in (run.outputs or {}).items() if isinstance(leaf, Tensor)}
        handed = handed if skips else {p: leaf for p, leaf in handed.items() if isinstance(p, int)}
        values = {place: (describe(tensor), tensor.requires_grad) for place, tensor in handed.items()}
        if seat.departure is not None:
            _hand(seat.departure, values, handed)
        going = Going(run.exits, run.after_exit if skips else 0)
        return Passed(
            run.record or {}, values, going, run.needed or (), tuple(run.wanted), frozenset(run.by_position),
            run.has_ended, stopped or run.doubt,
        )  # fmt: skip

    def _refuse(self, passed: Mapping[int, Passed], microbatch: int) -> None:
        """No stage came further than in the round before."""
        stage = next((stage for stage, of in sorted(passed.items()) if of.stopped), max(passed))
        error = PhantomError(
            passed[stage].stopped
            or "The stages wait for calls of each other's modules that none of them makes: the step takes other ways on"
            " other ranks, or calls a stage with what a later one returns. Train with one stage."
        )
        if (0, stage) not in self.seats:
            self._all_gather(None)  # that stage's rank says what is wrong
        raise self._fail(error, Action("F", stage, microbatch)) from error

    def _agree(self, signature: Hashable, agreed: Mapping[int, Contract]) -> None:
        for seat in self.seats.values():
            if seat.departure is not None:
                seat.departure.give(signature, agreed[seat.stage])
            if seat.arrival is not None:
                seat.arrival.give(signature, agreed[seat.stage - 1])

    @contextmanager
    def _without_graphs(self) -> Iterator[None]:
        graphs = self.cut.graphs
        if graphs is None:
            yield
            return
        is_on, graphs.is_on = graphs.is_on, False
        try:
            yield
        finally:
            graphs.is_on = is_on


def contracts(passed: Mapping[int, Passed], known: UnitOutputs) -> dict[int, Contract]:
    """What is agreed at every boundary, by the stage before it.

    Args:
        passed: what each stage came to in the last round.
        known: what all units return, by call.
    """
    agreed: dict[int, Contract] = {}
    further: list[Leaf] = []  # results that stages behind the boundary want
    for stage in range(max(passed) - 1, -1, -1):
        here, behind = passed[stage], passed[stage + 1]
        results = dict.fromkeys(leaf for leaf in (*behind.wanted, *further) if leaf in here.values)
        needed: tuple[Place, ...] = (*behind.needed, *(leaf for leaf in results if leaf not in behind.by_position))
        agreed[stage] = Contract(here.values, known, needed, going=here.going)
        further = agreed[stage].results()
    return agreed


def _hand(departure: Departure, values: Values, tensors: Mapping[Place, Tensor]) -> None:
    """Send, with a description, all that a stage can hand on."""
    departure.forward.send_object(values)
    departure.forward.send(list(tensors.values()), [meta for meta, _ in values.values()])


def _take(arrival: Arrival, stage: int, grad: bool) -> dict[Place, Tensor]:
    """Receive what the stage before can hand on."""
    what = f"stage {stage - 1} to go through a step that calls it several times"
    contract = Contract(arrival.forward.receive_object(what), {})
    received = arrival.forward.post(contract.metas(contract.travelling()), what).wait()
    return Inbox.of(dict(zip(contract.values, received, strict=True)), contract, grad).values
