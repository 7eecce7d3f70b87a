"""What each action of a schedule needs before it can start.

The rules, for stage s, micro-batch m (always of the same replica and slice):

* F needs F of every stage that feeds s;
* B or I needs F of s, and B or I of every stage that s feeds;
* W needs I of s;
* of a sequence cut into slices, F of a slice needs F of the slice before (its keys and values), B or I of a slice
  needs B or I of the slice after (their gradients);
* U needs nothing but its place in the row: which gradients an update takes in is what the row's order says.

Beyond this a row runs its actions one after another, in order. Weight versions are labels and order nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_parallel.pipeline.schedule import Action, Schedule


@dataclass(frozen=True, slots=True)
class Step:
    """An action with its row and the indices, in the order it stands in, of the actions it waits for."""

    action: Action
    row: int
    needs: tuple[int, ...]


def needs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """Actions whose results ``action`` uses, by the rules above.

    Raises:
        ValueError: the schedule lacks one of them.
    """
    return tuple(_rules(schedule, action.key))


def sources(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The part of ``needs`` that brings a value of another stage: what has to be received when it is on another row."""
    return tuple(need for need in needs(schedule, action) if need.stage != action.stage)


def _rules(schedule: Schedule, action: Action) -> Iterator[Action]:
    if action.kind == "F":
        yield from (_find(schedule, action, "F", stage=source) for source, to in schedule.edges if to == action.stage)
        if action.slice:
            yield _find(schedule, action, "F", slice=action.slice - 1)
    elif action.kind in "BI":
        yield _find(schedule, action, "F")
        yield from (_find(schedule, action, "BI", stage=to) for source, to in schedule.edges if source == action.stage)
        if action.slice is not None and _has(schedule, replace(action, kind="F", slice=action.slice + 1)):
            yield _find(schedule, action, "BI", slice=action.slice + 1)
    elif action.kind == "W":
        yield _find(schedule, action, "I")


def _has(schedule: Schedule, action: Action) -> bool:
    return action in schedule.location


def _find(schedule: Schedule, action: Action, kinds: str, **changes: int) -> Action:
    candidates = [replace(action, kind=kind, **changes) for kind in kinds]  # type: ignore[arg-type]
    for candidate in candidates:
        if _has(schedule, candidate):
            return candidate
    wanted = " or ".join(map(str, candidates))
    row, at = schedule.location[action]
    raise ValueError(
        f"Schedule {schedule.name!r}: {action} (row {row}, action {at}) needs {wanted}, which no row has. "
        f"Add {wanted} to the row of stage {candidates[0].stage}."
    )


def topological_order(schedule: Schedule) -> tuple[Step, ...]:
    """All actions in an order that keeps every row's order and puts each action after what it needs.

    Raises:
        ValueError: no such order exists; the message says which row waits for what.
    """
    done: dict[Action, int] = {}
    steps: list[Step] = []
    heads = [0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for row, line in enumerate(schedule.actions):
            while heads[row] < len(line):
                action = line[heads[row]]
                wanted = needs(schedule, action)
                if not all(need in done for need in wanted):
                    break
                done[action.key] = len(steps)
                steps.append(Step(action, row, tuple(done[need] for need in wanted)))
                heads[row] += 1
                progress = True
    if len(steps) < sum(map(len, schedule.actions)):
        raise ValueError(_circle(schedule, heads, done))
    return tuple(steps)


def _circle(schedule: Schedule, heads: list[int], done: dict[Action, int]) -> str:
    waits = []
    for row, line in enumerate(schedule.actions):
        if heads[row] < len(line):
            action = line[heads[row]]
            missing = [need for need in needs(schedule, action) if need not in done]
            where = ", ".join(f"{need} (row {schedule.location[need][0]})" for need in missing)
            waits.append(f"row {row} at {action} (action {heads[row]}) waits for {where}")
    return (
        f"Schedule {schedule.name!r} has actions before what they need: {'; '.join(waits)}. "
        "Move each consumer after its producer."
    )
