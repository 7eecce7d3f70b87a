"""Backwards that are split for nothing made whole again.

The one idea: splitting B into I and W costs a little time in each, and gains only where a rank that waits for the
input gradient gets it sooner, or where W is put off. An I with its own W right behind it, whose result no one waits for
in between, is a B.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from lightning_parallel.pipeline import schedule as dependencies
from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.schedule import Action, Schedule
from lightning_parallel.pipeline.simulator import simulate

Times = dict[Action, tuple[float, float]]  # start and end of each action


def merge_useless_splits(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Replace each I and its W by B where this makes no action start later.

    They have to be neighbours in their row, and every other row that uses the result of I has to be busy, by the
    simulated times, until W is done. With T_B = T_I + T_W no action ends later than before; with T_B < T_I + T_W, which
    is why a split costs, the schedule gets faster.

    Args:
        schedule: any.
        costs: by which it is decided who waits. Left out, 1 for F, I and W, 0 for a hop.

    Returns:
        The schedule with its name, and B where a split gained nothing.

    Example:
        >>> from lightning_parallel.pipeline.schedules import make
        >>> print(merge_useless_splits(make("zb_h1", 2, 3)).to_text())
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    times = _times(schedule, costs)
    users = _users(schedule)
    hop = (costs or Costs()).hop
    merged: set[Action] = set()
    for row, line in enumerate(schedule.actions):
        for first, second in itertools.pairwise(line):
            if first.kind == "I" and second.key == replace(first.key, kind="W"):
                done = times[second.key][1]
                if all(times[user.key][0] >= done + hop(row, other) for user, other in users[first.key]):
                    merged.add(first.key)
    rows = tuple(tuple(_merge(line, merged)) for line in schedule.actions)
    return replace(schedule, actions=rows)


def _times(schedule: Schedule, costs: Costs | None) -> Times:
    timeline = simulate(schedule, costs)
    return {
        action.key: (span.start, span.end)
        for line, spans in zip(schedule.actions, timeline.rows, strict=True)
        for action, span in zip(line, spans, strict=True)
    }


def _users(schedule: Schedule) -> dict[Action, list[tuple[Action, int]]]:
    """By action: the actions of other stages that use its result, with their rows."""
    users: dict[Action, list[tuple[Action, int]]] = defaultdict(list)
    for step in schedule.order:
        for need in dependencies.sources(schedule, step.action):
            users[need.key].append((step.action, step.row))
    return users


def _merge(line: tuple[Action, ...], merged: set[Action]) -> Iterator[Action]:
    for action in line:
        if action.key in merged:
            yield replace(action, kind="B")
        elif not (action.kind == "W" and replace(action.key, kind="I") in merged):
            yield action
