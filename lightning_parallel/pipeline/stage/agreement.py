"""Who sends what to whom, decided from what every stage needed in a micro-batch that went through all of them.

The one idea: a value goes from the last stage that made or used it straight to the next one that uses it. So it crosses
once for every stage that uses it, lies on no other, and its gradients come back along the same way, each stage adding
its own: in the order in which one process adds them. Every rank decides alike, since all know the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_parallel.pipeline.phantoms.stand_in import Leaf
from lightning_parallel.pipeline.stage.boundary import Contract, Values
from lightning_parallel.pipeline.stage.calls import StopRule
from lightning_parallel.pipeline.stage.stage_run import UnitOutputs
from lightning_parallel.pipeline.stage.stage_values import Place


@dataclass
class Passed:
    """What one stage came to in a round.

    Attributes:
        record: what its units return, by call.
        values: what it can hand on, and what of that carries a gradient.
        going: how far it went.
        needed, wanted, wanted_for, by_position: what it lacked, see `StageRun`.
        has_ended: whether the step ran to its end.
        stopped: why it did not go on, if something may be wrong.
    """

    record: UnitOutputs
    values: Values
    going: StopRule
    needed: tuple[int, ...]
    wanted: tuple[Leaf, ...]
    wanted_for: Mapping[int, tuple[Leaf, ...]]
    by_position: frozenset[Leaf]
    has_ended: bool
    stopped: str


def contracts(passed: Mapping[int, Passed], known: UnitOutputs) -> dict[tuple[int, int], Contract]:
    """What is agreed, by (stage that sends, stage that receives); neighbours have a contract always.

    Args:
        passed: what each stage came to in the last round.
        known: what all units return, by call.
    """
    needed: dict[tuple[int, int], list[Place]] = {(s - 1, s): list(passed[s].needed) for s in passed if s}
    uses = {stage: _uses(passed, stage) for stage in passed}
    for stage in sorted(passed):
        for leaf in uses[stage]:
            needed.setdefault((_holder(passed, uses, stage, leaf), stage), []).append(leaf)
    return {
        (source, target): Contract(
            {place: passed[source].values[place] for place in places}, known, tuple(places), going=passed[source].going
        )
        for (source, target), places in needed.items()
    }


def _uses(passed: Mapping[int, Passed], stage: int) -> list[Leaf]:
    """What of earlier units a stage needs and does not get by its place among the first block's arguments."""
    here = passed[stage]
    sent = passed[stage + 1].needed if stage + 1 in passed else ()
    for_next = (leaf for position in sent for leaf in here.wanted_for.get(position, ()))
    return [leaf for leaf in dict.fromkeys((*here.wanted, *for_next)) if leaf not in here.by_position]


def _holder(passed: Mapping[int, Passed], uses: Mapping[int, list[Leaf]], stage: int, leaf: Leaf) -> int:
    """The last stage before one that has a unit's result: it made it, or uses it itself."""
    return next(
        before
        for before in range(stage - 1, -1, -1)
        if leaf[0] in passed[before].record or leaf in uses[before] or leaf in passed[before].by_position
    )
