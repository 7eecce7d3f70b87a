"""Calls of a unit in one step: their names, how far a run goes over them, and what is said where it cannot.

The one idea: a run of the step as one stage decides; the words in which it refuses, with module, stages and remedy, are
kept apart from the deciding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_parallel.pipeline.partition.layout import Unit
from lightning_parallel.pipeline.stage.derivatives import RUNS_IT

_CALL = ", call "


@dataclass(frozen=True)
class StopRule:
    """How far a run goes.

    Args:
        exits: it is over when the next stage's first block was called so often,
        after: and this stage's units so often since.
        finding: nobody knows yet: it goes on until it would need what a unit of another stage returns for the first
            time.
    """

    exits: int = 1
    after: int = 0
    finding: bool = False


ONCE = StopRule()


def nth(name: str, before_this: int) -> str:
    """A key for what one of several calls of a unit made.

    Example:
        >>> nth("net.0", 0), nth("net.0", 1)
        ('net.0', 'net.0, call 2')
    """
    return f"{name}{_CALL}{before_this + 1}" if before_this else name


def name_of(key: str) -> str:
    """The unit's name in such a key."""
    return key.split(_CALL)[0]


# -- what a run says when it cannot go on ------------------------------------------------------------------------------

LATER = (
    "A stage makes all its calls of a step before later stages run, so what these return cannot come back to it: choose"
    " blocks= (in the order in which they run) so that both share a stage, make a layer that several stages use one for"
    " each and tie their weights, or train with one stage."
)
NOT_BETWEEN = (
    "Here it does so between calls of the model, all of which a stage makes before later stages run: read it behind the"
    " last call."
)
NOT_INTO = (
    "Here it does so between calls of the model, all of which a stage makes before later stages run: use an operator"
    " that is not in place (h = h + block(h), not h += block(h))."
)
THROUGH_BLOCKS = "Pass the value through every block between, or set skip_connections=True."
NEARER = (
    "Pass it through the blocks (as an argument of the block where the stage begins), set skip_connections=True, or"
    " choose blocks= so that producer and reader share a stage."
)


DERIVATIVE_OF_FREED = (
    'The step takes a derivative (torch.autograd.grad, backward, torch.func), and gather="microbatch" frees the weights'
    f" of a block as soon as it was called. {RUNS_IT}"
)


TRANSFORMED = (
    "The step calls the model inside a function of torch.func (grad, vjp, jvp, vmap), and a part of the model runs in"
    f" other processes, which see no more than plain values. {RUNS_IT}"
)
BACKWARD_IN_STEP = (
    "The step calls backward itself, and what it leaves in the parameters' gradients would be added to the step's own,"
    " which begin before Lightning zeroes them. Take torch.autograd.grad(...) by the inputs that you need. Or"
    " ZeROStrategy(stage=1) or stage=2 run it as one process does."
)


def derivative(stage: int) -> str:
    """The step takes a derivative through a stage that another rank holds."""
    return (
        "The step takes a derivative (torch.autograd.grad, backward, torch.func), of which the graph of stage"
        f" {stage} has a part: stage {stage - 1 if stage else 1} ran the rest, and what it leads to would be taken for"
        f" zero. {RUNS_IT}"
    )


def moved(unit: str, stage: int) -> str:
    """The remedy for a module that lies on the wrong stage."""
    return f'stages={{"{unit}": {stage}}}'


def not_all_called(stage: int, first_block: str, called: int, going: StopRule, returned_none: bool) -> str:
    """The step ended without (all) calls of the next stage's first block."""
    times = f", as often as before ({called} times, not {going.exits})" if going.exits > 1 else ""
    skip = " To skip a batch, return 0 * its loss in place of None." if returned_none else ""
    return (
        f"The step ended on stage {stage} without calling {first_block}, the first block of stage {stage + 1}{times}. A"
        f" step must call every block, in order; use fewer stages or other blocks=.{skip}"
    )


def called_again(unit: Unit) -> str:
    """A stage is called when it has ended, and nobody expected that."""
    return (
        f"Module `{unit.name}` (stage {unit.stage}) is called again in one step, and stage {unit.stage} has ended by"
        " then. Call it as often in every step as in the first of its kind (and leave dynamic_shapes off), join the"
        " inputs and call it once, or train with one stage."
    )


def never_called(unit: Unit, stage: int) -> str:
    """An earlier stage's unit is called, which that stage did not call."""
    return (
        f"Module `{unit.name}` belongs to stage {unit.stage}, which did not call it before stage {stage} began, but the"
        f" step calls it on stage {stage}. Register modules in the order in which they run, or move it with"
        f" {moved(unit.name, stage)}."
    )


def earlier(unit: Unit, stage: int) -> str:
    """What to do about a unit that is called before the first block of its stage."""
    return f"Register modules in the order in which they run, or move it with {moved(unit.name, stage - 1)}."


def too_early(unit: Unit, stage: int, first_block: str) -> str:
    """A later stage's unit is called before the next stage's first block."""
    return (
        f"Stage {stage} reached module `{unit.name}` of stage {unit.stage} before {first_block}, the first block of"
        f" stage {stage + 1}. Register modules in the order in which they run, or move it with"
        f" {moved(unit.name, stage)}."
    )


def out_of_order(unit: Unit, last_block: str) -> str:
    """The next stage's first block is called before this stage's last one."""
    return f"The step calls `{unit.name}` before `{last_block}`. Name the blocks in execution order with blocks=."


def without_gradients(unit: Unit, stage: int) -> str:
    """The message for a block that is called without gradients in a training step."""
    return (
        f"Block `{unit.name}` of stage {stage} is called without gradients inside a training step, as reentrant"
        " activation checkpointing does. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
    )


def not_sent(unit: Unit, stage: int, origins: Iterable[str]) -> str:
    """The first block needs what the stage before did not send."""
    return (
        f"Block `{unit.name}` of stage {stage} needs {', '.join(origins)}, which stage {stage - 1} does not hold or did"
        " not send at first. Pass the value through every block between, set skip_connections=True, or"
        " dynamic_shapes=True if the block's arguments change from batch to batch."
    )


def not_held(unit: Unit, stage: int, origins: Iterable[str], remedy: str) -> str:
    """The next stage's first block needs what this stage cannot give."""
    return (
        f"Block `{unit.name}` of stage {unit.stage} needs a value computed from {', '.join(origins)}, which stage"
        f" {stage} does not hold. {remedy}"
    )


def written_to(stage: int, first_block: str, place: int | tuple[str, int]) -> str:
    """What was handed on is not what it was."""
    if isinstance(place, tuple):
        return (
            f"The step writes into what `{place[0]}` returned, which a later stage uses as it was before: stage {stage}"
            " sends it when its part of the step is over. Use an operator that is not in place."
        )
    return (
        f"The step writes into an argument of {first_block} after it called it, and before it calls it again: stage"
        f" {stage} sends all calls' arguments together. Use an operator that is not in place."
    )


def runs_on(unit: Unit, stage: int) -> str:
    """A recomputation goes beyond its stage."""
    return (
        f"A recomputation on stage {stage} runs on into `{unit.name}` of stage {unit.stage}. Leave early stop of"
        " torch.utils.checkpoint on, or checkpoint blocks one by one."
    )


def which_call(unit: Unit) -> str:
    """A recomputation of one of several calls."""
    return (
        f"A recomputation calls `{unit.name}` (stage {unit.stage}), which the step calls more than once: which call it"
        " repeats cannot be told without the random numbers that it began with. Leave preserve_rng_state of"
        ' torch.utils.checkpoint on, use PipelineStrategy(recompute="block"), or checkpoint inside it.'
    )


def written_by(name: str) -> str:
    """A block that is to be computed again writes into what it would be computed from."""
    return (
        f"Block `{name}` writes into its arguments, so the backward cannot compute it again from them. Use"
        ' inplace=False in its first layer, or recompute="none".'
    )
