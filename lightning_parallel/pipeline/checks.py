"""Proofs that a schedule runs to its end, in words where it does not.

``check`` looks for, in this order: stages without a row or edges that lead backwards (placement); work that is missing
or doubled (completeness); an action before what it needs (``dependencies`` holds the rules); values that arrive in
another order than they are used, or rows that wait for each other in sends (``transfers``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from lightning_parallel.pipeline.transfers import (
    check_deadlock,
    check_fifo,
    check_stage_order,
    receive_ahead_needed,
)

if TYPE_CHECKING:
    from lightning_parallel.pipeline.schedule import Schedule

__all__ = ["check", "check_completeness", "check_deadlock", "check_fifo", "check_placement", "receive_ahead_needed"]


def check(schedule: Schedule, receive_ahead: int = 2) -> None:
    """Raise ``ValueError`` unless the schedule is placed, complete, ordered, FIFO and free of deadlock."""
    check_placement(schedule)
    check_completeness(schedule)
    _ = schedule.order  # raises when an action comes before what it needs
    check_fifo(schedule)
    check_stage_order(schedule)
    check_deadlock(schedule, receive_ahead)


def check_placement(schedule: Schedule) -> None:
    """Every replica holds every stage, on a row that exists; every action lies on its stage's row; edges go forward."""
    name, num_stages = schedule.name, schedule.num_stages
    wanted = {(replica, stage) for replica in range(schedule.num_replicas) for stage in range(num_stages)}
    if missing := sorted(wanted - set(schedule.placement)):
        raise ValueError(f"Schedule {name!r} places no row for (replica, stage) {missing[0]} of {num_stages} stages.")
    for (replica, stage), row in schedule.placement.items():
        if not 0 <= row < schedule.num_ranks:
            raise ValueError(
                f"Schedule {name!r} places stage {stage} of replica {replica} on row {row}, "
                f"but has rows 0 to {schedule.num_ranks - 1}."
            )
    for source, target in schedule.edges:
        if not 0 <= source < target < num_stages:
            raise ValueError(
                f"Schedule {name!r} has the edge ({source}, {target}). Values go from a stage to a later one, "
                f"and its stages are 0 to {num_stages - 1}."
            )
    for row, line in enumerate(schedule.actions):
        for at, action in enumerate(line):
            holder = schedule.placement.get((action.replica, action.stage))
            if holder != row:
                place = "nowhere" if holder is None else f"on row {holder}"
                raise ValueError(f"Schedule {name!r}: {action} is action {at} of row {row}, its stage lies {place}.")


def check_completeness(schedule: Schedule) -> None:
    """Every micro-batch goes once through every stage of one replica, forward and, if any does, backward."""
    actions = schedule.of("F", "B", "I", "W", "U")
    doubled = [action for action, count in Counter(action.key for action in actions).items() if count > 1]
    if doubled:
        raise ValueError(f"Schedule {schedule.name!r} runs {doubled[0]} {actions.count(doubled[0])} times, not once.")
    work = {stage: _pieces(schedule, *stage) for stage in schedule.placement}
    for (replica, stage), pieces in work.items():
        _compare(schedule, work[replica, 0]["F"], pieces["F"], f"forward on stage {stage} of replica {replica}")
        if schedule.of("B", "I", "W"):
            whole = pieces["B"] | pieces["I"]
            _compare(schedule, pieces["F"], whole, f"backward (B or I) on stage {stage} of replica {replica}")
            _compare(schedule, pieces["I"], pieces["W"], f"weight gradient (W) on stage {stage} of replica {replica}")
            if both := pieces["B"] & pieces["I"]:
                microbatch = min(both, key=str)[0]
                raise ValueError(
                    f"Schedule {schedule.name!r} runs B and I of micro-batch {microbatch} on stage {stage}: "
                    "a backward is either whole (B) or split (I and W)."
                )
    _check_microbatches(schedule)


def _pieces(schedule: Schedule, replica: int, stage: int) -> dict[str, set[tuple[int, int | None]]]:
    """(micro-batch, slice) pairs that each kind covers on one stage."""
    pieces: dict[str, set[tuple[int, int | None]]] = {kind: set() for kind in "FBIWU"}
    for action in schedule.actions[schedule.placement[replica, stage]]:
        if (action.replica, action.stage) == (replica, stage):
            pieces[action.kind].add((action.microbatch, action.slice))
    return pieces


def _compare(
    schedule: Schedule, wanted: set[tuple[int, int | None]], got: set[tuple[int, int | None]], what: str
) -> None:
    difference = wanted ^ got
    if difference:
        microbatch, piece = min(difference, key=str)
        where = f"micro-batch {microbatch}" + ("" if piece is None else f", slice {piece}")
        verb = "lacks the" if (microbatch, piece) in wanted else "has no use for the"
        raise ValueError(f"Schedule {schedule.name!r} {verb} {what} of {where}.")


def _check_microbatches(schedule: Schedule) -> None:
    replicas: dict[int, set[int]] = defaultdict(set)
    slices: dict[int, list[int]] = defaultdict(list)
    for action in schedule.of("F"):
        replicas[action.microbatch].add(action.replica)
        if action.slice is not None and action.stage == 0:
            slices[action.microbatch].append(action.slice)
    wrong = sorted(set(range(schedule.num_microbatches)) ^ set(replicas))
    if wrong:
        raise ValueError(
            f"Schedule {schedule.name!r} has num_microbatches={schedule.num_microbatches}, so micro-batches 0 to "
            f"{schedule.num_microbatches - 1}, but runs {sorted(replicas)} forward: see micro-batch {wrong[0]}."
        )
    for microbatch, used in sorted(replicas.items()):
        if len(used) > 1:
            raise ValueError(
                f"Schedule {schedule.name!r} runs micro-batch {microbatch} on replicas {sorted(used)}: "
                "a micro-batch goes through one replica."
            )
    for microbatch, pieces in sorted(slices.items()):
        if sorted(pieces) != list(range(len(pieces))):
            raise ValueError(f"Schedule {schedule.name!r} cuts micro-batch {microbatch} into slices {sorted(pieces)}.")
