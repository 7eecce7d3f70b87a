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
from dataclasses import dataclass
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
    return tuple(need for need, _ in located_needs(schedule, action))


def sources(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The part of ``needs`` that brings a value of another stage: what has to be received when it is on another row."""
    return tuple(need for need in needs(schedule, action) if need.stage != action.stage)


def located_needs(schedule: Schedule, action: Action) -> Iterator[tuple[Action, tuple[int, int]]]:
    """``needs`` with the (row, position in the row) of each: it is done once its row has passed that position."""
    stage, piece = action.stage, action.slice
    if action.kind == "F":
        for source in schedule.feeds[0].get(stage, ()):
            yield _find(schedule, action, "F", source, piece)
        if piece:
            yield _find(schedule, action, "F", stage, piece - 1)
    elif action.kind in "BI":
        yield _find(schedule, action, "F", stage, piece)
        for target in schedule.feeds[1].get(stage, ()):
            yield _find(schedule, action, "BI", target, piece)
        if piece is not None and _variant(action, "F", stage, piece + 1) in schedule.location:
            yield _find(schedule, action, "BI", stage, piece + 1)
    elif action.kind == "W":
        yield _find(schedule, action, "I", stage, piece)


def _variant(action: Action, kind: str, stage: int, piece: int | None) -> Action:
    return type(action)(kind, stage, action.microbatch, action.replica, piece)  # type: ignore[arg-type]


def _find(
    schedule: Schedule, action: Action, kinds: str, stage: int, piece: int | None
) -> tuple[Action, tuple[int, int]]:
    for kind in kinds:
        candidate = _variant(action, kind, stage, piece)
        location = schedule.location.get(candidate)
        if location is not None:
            return candidate, location
    wanted = " or ".join(str(_variant(action, kind, stage, piece)) for kind in kinds)
    row, at = schedule.location[action.key]
    raise ValueError(
        f"Schedule {schedule.name!r}: {action} (row {row}, action {at}) needs {wanted}, which no row has. "
        f"Add {wanted} to the row of stage {stage}."
    )


def topological_order(schedule: Schedule, as_one: bool = False) -> tuple[Step, ...]:
    """All actions in an order that keeps every row's order and puts each action after what it needs.

    Args:
        schedule: whose actions are ordered.
        as_one: whether the two actions of a pair (``Schedule.paired``) run as one: the first waits for what either
            needs, and what needs the first waits for both.

    Raises:
        ValueError: no such order exists; the message says which row waits for what.
    """
    places_of = _places_as_one if as_one else _places
    numbers: list[list[int]] = [[] for _ in schedule.actions]  # of each row's actions that are done, in row order
    steps: list[Step] = []
    progress = True
    while progress:
        progress = False
        for row, line in enumerate(schedule.actions):
            for action in line[len(numbers[row]) :]:
                places = places_of(schedule, action)
                if not all(at < len(numbers[source]) for source, at in places):
                    break
                numbers[row].append(len(steps))
                steps.append(Step(action, row, tuple(numbers[source][at] for source, at in places)))
                progress = True
    if len(steps) < sum(map(len, schedule.actions)):
        raise ValueError(_circle(schedule, [len(done) for done in numbers]))
    return tuple(steps)


def _places(schedule: Schedule, action: Action) -> list[tuple[int, int]]:
    return [place for _, place in located_needs(schedule, action)]


def _places_as_one(schedule: Schedule, action: Action) -> list[tuple[int, int]]:
    row, at = schedule.location[action.key]
    both = (action, schedule.actions[row][at + 1]) if action.key in schedule.paired else (action,)
    needs = {need.key: place for one in both for need, place in located_needs(schedule, one)}
    return [(row, at + (need in schedule.paired)) for need, (row, at) in needs.items()]


def _circle(schedule: Schedule, heads: list[int]) -> str:
    waits = []
    for row, line in enumerate(schedule.actions):
        if heads[row] < len(line):
            action = line[heads[row]]
            missing = [(need, row) for need, (row, at) in located_needs(schedule, action) if at >= heads[row]]
            where = ", ".join(f"{need} (row {row})" for need, row in missing)
            waits.append(f"row {row} at {action} (action {heads[row]}) waits for {where}")
    return (
        f"Schedule {schedule.name!r} has actions before what they need: {'; '.join(waits)}. "
        "Move each consumer after its producer."
    )
