"""What a step asks of the engine, and the marks that the engine leaves of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_parallel.pipeline.runtime.turns import Meet, Swap
from lightning_parallel.pipeline.schedule import Action, Schedule

if TYPE_CHECKING:
    from lightning_parallel.pipeline.gradients.early_sums import Round
    from lightning_parallel.zero.gather.parameter_gather import ParameterGather


@dataclass(frozen=True)
class Joined:
    """The stages of a step whose forwards run in turns.

    Args:
        stages: which.
        together: what is done where they meet, see `run_in_turns`.
        world: see `run_in_turns`.
    """

    stages: frozenset[int]
    together: Meet
    world: Sequence[Swap] = ()


@dataclass
class StepWork:
    """What one step of the Trainer asks of a rank.

    Args:
        schedule: what every rank does.
        steps: for each micro-batch, the user's step on it.
        signatures: for each micro-batch, what decides the shapes in it; equal on all ranks.
        batch: number of the batch, for the random streams.
        loss_of: the loss in what the step returned.
        scales: for each micro-batch, what its loss is multiplied with before its backward; empty in evaluation.
        after_forwards: called with the results once the last of this rank's is there, or None.
        windows: what makes a stage's parameters whole for an action, where they are divided, or None.
        joined: the stages whose micro-batches run in turns, or None.
        may_begin_anew: whether to go through the step in vain where its calls are not known yet.
        is_void: set where that was so: what the step made is to be dropped.
        after_action: called with -1 before the first action, and after each one with its number in the row; or None.
        early: what sends gradients to other copies of the model as the last backwards make them, or None.
    """

    schedule: Schedule
    steps: Sequence[Callable[[], Any]]
    signatures: Sequence[Hashable]
    batch: int
    loss_of: Callable[[Any], Tensor] | None = None
    scales: Sequence[Tensor] = ()
    after_forwards: Callable[[list[Any]], None] | None = None
    after_action: Callable[[int], None] | None = None
    early: Round | None = None
    windows: ParameterGather | None = None
    joined: Joined | None = None
    may_begin_anew: bool = False
    is_void: bool = False

    @property
    def training(self) -> bool:
        return self.loss_of is not None


@dataclass
class Marks:
    """The marks of one step: for every action (began, inputs there, ended)."""

    schedule: Schedule
    actions: list[Action] = field(default_factory=list)
    moments: list[Any] = field(default_factory=list)
