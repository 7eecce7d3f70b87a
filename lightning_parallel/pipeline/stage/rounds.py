"""Which stages a step calls, and how often: found out on one micro-batch, before a schedule runs.

The one idea: a stage can go on behind a call of a later stage if it knows the shapes of what that returns. So a
micro-batch goes through all stages, again and again; in each round a stage runs the step until it would need what a
unit of another stage returns for the first time, and after the round all stages tell what their units returned. When
the last stage comes to the end of the step, the others know how often each calls the next. From then on a stage runs
all its calls in one forward, and what they hand on travels together; a schedule never knows.

Where stages use what any earlier one made, rounds find out that too: in them everything goes by every stage, so each
knows what it needed, and all agree on who sends it. Nothing is kept of the rounds but descriptions. Left out: a stage
that needs what a later one made of its earlier call; it is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_parallel.errors import raise_told
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.runtime.stage_executor import StageExecutor
from lightning_parallel.pipeline.runtime.work import StepWork
from lightning_parallel.pipeline.schedule import Action
from lightning_parallel.pipeline.stage.agreement import Passed, contracts
from lightning_parallel.pipeline.stage.boundary import Contract, ReceivedValues, RecvBoundary, Values, undescribable
from lightning_parallel.pipeline.stage.calls import StopRule
from lightning_parallel.pipeline.stage.cut import CutModel
from lightning_parallel.pipeline.stage.stage_run import StageRun, UnitOutputs
from lightning_parallel.pipeline.stage.stage_values import Place
from lightning_parallel.pipeline.transport.tensor_meta import describe

OpenStraight = Callable[[int, int], None]


@dataclass
class Handed:
    """What a stage gets from the one before in a round.

    Attributes:
        values: descriptions of the tensors.
        known: what units return, by call.
        made_for: see `StageRun`.
        inputs: the tensors, where they have arrived.
        is_void: nothing is handed on.
    """

    values: Values
    known: UnitOutputs
    made_for: tuple[int, ...] = ()
    inputs: dict[Place, Tensor] = field(default_factory=dict)
    is_void: bool = False


class Rounds:
    """Finds out how often a step calls each stage.

    Attributes:
        always: every kind of step has to be asked about, however often it calls the model.

    Args:
        cut: the model.
        executors: the stages of this rank, by (replica, stage).
        all_gather: gives every rank's object to every rank of the copy.
        fail: see `Engine`.
        open_straight: opens a boundary between two stages that are no neighbours, of every replica; None: values do not
            go from other stages than the one before.
    """

    def __init__(
        self,
        cut: CutModel,
        executors: Mapping[tuple[int, int], StageExecutor],
        all_gather: Callable[[Any], list[Any]],
        fail: Callable[[Exception, Action], BaseException],
        open_straight: OpenStraight | None = None,
    ) -> None:
        self.cut, self.executors, self._all_gather, self._fail = cut, executors, all_gather, fail
        self._open_straight, self.always = open_straight, open_straight is not None
        self._known: dict[Hashable, UnitOutputs] = {}

    def new(self, signatures: Sequence[Hashable]) -> list[int]:
        """The first micro-batch of every signature that was not asked about."""
        return [signatures.index(s) for s in dict.fromkeys(signatures) if s not in self._known]

    def forget_agreements(self) -> None:
        """A step went through in vain: what it agreed on is wrong. On all ranks."""
        self._known.clear()
        if self.cut.graphs is not None:
            self.cut.graphs.is_on = False  # it was no step after which libraries have chosen kernels
        for executor in self.executors.values():
            executor.forget_agreements()

    def learn(self, work: StepWork, microbatch: int) -> None:
        """Find out about the signature of a micro-batch; all ranks of the copy call it.

        Raises:
            PhantomError: the step cannot be run in stages as it is written.
        """
        passed, known = self.find(work, microbatch)
        self._agree(work.signatures[microbatch], contracts(passed, known))
        self._known[work.signatures[microbatch]] = known

    def known(self, signature: Hashable) -> UnitOutputs:
        """What was found out about units' results for a signature; nothing where nobody had to ask."""
        return self._known.get(signature, {})

    def find(self, work: StepWork, microbatch: int) -> tuple[Mapping[int, Passed], UnitOutputs]:
        """Go through all stages as often as it takes; what each came to, and what all units return."""
        known: UnitOutputs = {}
        with self.without_graphs():
            passed = self._round(work, microbatch, known)
            while not passed[max(passed)].has_ended:
                new = {name: made for of in passed.values() for name, made in of.record.items() if name not in known}
                if not new:
                    self._refuse(passed, microbatch)
                known = {**known, **new}
                passed = self._round(work, microbatch, known)
        return passed, {**known, **{name: made for of in passed.values() for name, made in of.record.items()}}

    def _round(self, work: StepWork, microbatch: int, known: UnitOutputs) -> dict[int, Passed]:
        """One round of all stages."""
        mine = {}
        for (replica, stage), executor in sorted(self.executors.items()):
            if replica == 0:
                try:
                    mine[stage] = self._pass(executor, work, microbatch, known)
                except Exception as error:
                    raise_told(self._fail(error, Action("F", stage, microbatch)), error)
        return {stage: of for ranks in self._all_gather(mine) for stage, of in sorted(ranks.items())}

    def _pass(self, executor: StageExecutor, work: StepWork, microbatch: int, known: UnitOutputs) -> Passed:
        """One round of one stage."""
        handed = self.take(executor, known, work.training)
        run = self.begin(executor, handed, self.cut.streams.begin(work.batch, microbatch), microbatch)
        stopped = _go_as_far(run, work.steps[microbatch])
        _refuse_undescribable(run)
        values = self.hand(executor, run, handed)
        going = StopRule(run.exits, run.after_exit if self._skips else 0)
        return Passed(
            run.record or {}, values, going, run.needed or (), run.wanted, run.wanted_for,
            frozenset(run.by_position), run.has_ended, stopped or run.doubt,
        )  # fmt: skip

    @property
    def _skips(self) -> bool:
        return self._open_straight is not None

    def take(self, executor: StageExecutor, known: UnitOutputs, grad: bool) -> Handed:
        """What the stage before hands on; `known`: what is known of units' results before."""
        return Handed({}, known) if executor.arrival is None else _take(executor.arrival, grad)

    def begin(self, executor: StageExecutor, handed: Handed, key: int, microbatch: int = 0) -> StageRun:
        """A run of a stage with what was handed to it, as far as the step goes."""
        return StageRun(
            self.cut, executor.stage, microbatch, key, handed.inputs, handed.known, learn=True, again=True,
            keep=[] if self._skips else None, going=StopRule(finding=True), made_for=handed.made_for,
        )  # fmt: skip

    def hand_void(self, executor: StageExecutor) -> None:
        """Tell the next stage that nothing comes."""
        if executor.departure is not None:
            executor.departure.forward.send_object(Handed({}, {}, is_void=True))

    def hand(self, executor: StageExecutor, run: StageRun, handed: Handed) -> Values:
        """Send all that a run can hand on to the next stage; returns what is said of it."""
        tensors = {
            place: leaf for place, leaf in (run.outputs or {}).items()
            if isinstance(leaf, Tensor) and (self._skips or isinstance(place, int))
        }  # fmt: skip
        values = {place: (describe(tensor), tensor.requires_grad) for place, tensor in tensors.items()}
        if executor.departure is not None:
            after = Handed(values, {**handed.known, **(run.record or {})}, tuple(run.wanted_for))
            executor.departure.forward.send_object(after)
            executor.departure.forward.send(list(tensors.values()), [meta for meta, _ in values.values()])
        return values

    def _refuse(self, passed: Mapping[int, Passed], microbatch: int) -> None:
        """No stage came further than in the round before."""
        stage = next((stage for stage, of in sorted(passed.items()) if of.stopped), max(passed))
        error = PhantomError(
            passed[stage].stopped
            or "The stages wait for calls of each other's modules that none of them makes: the step takes other ways on"
            " other ranks, or calls a stage with what a later one returns. Train with one stage."
        )
        if (0, stage) not in self.executors:
            self._all_gather(None)  # that stage's rank says what is wrong
        raise_told(self._fail(error, Action("F", stage, microbatch)), error)

    def _agree(self, signature: Hashable, agreed: Mapping[tuple[int, int], Contract]) -> None:
        """Tell every boundary what was found out; those between stages that are no neighbours may have to be opened."""
        for source, target in sorted(agreed):
            if target > source + 1:
                assert self._open_straight is not None
                self._open_straight(source, target)
        for executor in self.executors.values():
            for boundary in executor.boundaries():
                contract = agreed.get(boundary.stages)
                if contract is not None:
                    boundary.give(signature, contract)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Inside, blocks run as they are."""
        graphs = self.cut.graphs
        if graphs is None:
            yield
            return
        is_on, graphs.is_on = graphs.is_on, False
        try:
            yield
        finally:
            graphs.is_on = is_on


def _go_as_far(run: StageRun, step: Callable[[], Any]) -> str:
    """Run the step as far as it goes; returns what stopped it, maybe behind all that other stages wait for."""
    try:
        run.forward(step)
    except PhantomError as error:
        if run.is_last or not run.exits:
            raise
        return str(error)
    return ""


def _refuse_undescribable(run: StageRun) -> None:
    """What a stage's units return is told to all ranks."""
    try:
        pickle.dumps(run.record)
    except Exception as error:
        raise PhantomError(undescribable(run.stage, "the other stages", error)) from error


def _take(arrival: RecvBoundary, grad: bool) -> Handed:
    """Receive what the stage before can hand on."""
    what = f"stage {arrival.source} to go through a step whose calls are not known yet"
    handed: Handed = arrival.forward.receive_object(what)
    contract = Contract(handed.values, {})
    received = arrival.forward.post(contract.metas(contract.travelling()), what).wait()
    handed.inputs = ReceivedValues.of([(contract, received)], grad).values
    return handed
