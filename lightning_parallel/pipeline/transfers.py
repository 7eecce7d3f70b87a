"""What travels between the rows of a schedule, and proofs that it arrives.

Values that pass each other on a channel, or between two stages of a row, would be taken for one another (FIFO). The
deadlock rule assumes *rendezvous* sends: a send ends when its receive is posted, which is what NCCL and large messages
do, while small messages over sockets are buffered and hide the mistake. A row runs an action, then sends its results,
and while it waits there it has posted the receives of its next ``receive_ahead`` actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from lightning_parallel.pipeline import dependencies

if TYPE_CHECKING:
    from lightning_parallel.pipeline.schedule import Action, Schedule


class StageMessage(NamedTuple):
    """A value that leaves a row: made by ``producer``, used by ``consumer`` on another row."""

    producer: Action
    consumer: Action


class Route(NamedTuple):
    """Messages of one channel keep their order: activations (forward) and gradients (backward) have one each."""

    source: int
    target: int
    direction: str


def messages_in(schedule: Schedule, action: Action) -> Iterator[tuple[Route, StageMessage]]:
    """What ``action`` receives from other rows, in the order of the schedule's edges."""
    row = schedule.row_of(action)
    direction = "forward" if action.kind == "F" else "backward"
    for producer in dependencies.sources(schedule, action):
        if schedule.row_of(producer) != row:
            yield Route(schedule.row_of(producer), row, direction), StageMessage(producer, action)


def messages_out(schedule: Schedule) -> dict[Action, list[tuple[Route, StageMessage]]]:
    """What each action (looked up by ``action.key``) sends to other rows, in the order in which it sends."""
    out: dict[Action, list[tuple[Route, StageMessage]]] = defaultdict(list)
    for step in schedule.order:
        for channel, message in messages_in(schedule, step.action):
            out[message.producer].append((channel, message))
    for sent in out.values():
        sent.sort(key=lambda entry: entry[1].consumer.stage)
    return out


def check_fifo(schedule: Schedule) -> None:
    """On every channel the values are used in the order in which they were made.

    Raises:
        ValueError: naming the channel and the first two values that pass each other.
    """
    sent: dict[Route, list[StageMessage]] = defaultdict(list)
    used: dict[Route, list[StageMessage]] = defaultdict(list)
    out = messages_out(schedule)
    for line in schedule.actions:
        for action in line:
            for channel, message in out.get(action.key, ()):
                sent[channel].append(message)
            for channel, message in messages_in(schedule, action):
                used[channel].append(message)
    for channel, messages in sent.items():
        for made, wanted in zip(messages, used[channel], strict=True):
            if made != wanted:
                raise ValueError(
                    f"Schedule {schedule.name!r}: row {channel.source} sends the result of {made.producer} to row "
                    f"{channel.target} ({channel.direction}), which uses the result of {wanted.producer} first. "
                    "Values of one channel arrive in the order they were sent: run both rows in one order."
                )


def check_stage_order(schedule: Schedule) -> None:
    """All stages of a replica run the micro-batches in one order, and so does what any two of them send each other.

    Raises:
        ValueError: naming the stage and the first micro-batch that is out of order.
    """
    for (replica, stage), row in sorted(schedule.placement.items()):
        for kinds, name in (("F", "forward"), ("BI", "backward")):
            first, here = (_order(schedule, replica, of, kinds) for of in (0, stage))
            wrong = next((at for at, (a, b) in enumerate(zip(first, here, strict=True)) if a != b), None)
            if wrong is not None:
                raise ValueError(
                    f"Schedule {schedule.name!r}: stage {stage} (row {row}) runs the {name} of micro-batch"
                    f" {here[wrong][0]} where stage 0 runs that of micro-batch {first[wrong][0]}. Values between two"
                    " stages arrive in the order they were sent: run micro-batches in one order on all stages."
                )


def _order(schedule: Schedule, replica: int, stage: int, kinds: str) -> list[tuple[int, int | None]]:
    """The (micro-batch, slice) of a stage's actions, in its row's order."""
    line = schedule.actions[schedule.placement[replica, stage]]
    of = (replica, stage)
    return [(a.microbatch, a.slice) for a in line if (a.replica, a.stage) == of and a.kind in kinds]


def check_deadlock(schedule: Schedule, receive_ahead: int = 2) -> None:
    """With rendezvous sends and ``receive_ahead`` posted receives, no row waits for ever.

    Raises:
        ValueError: naming the rows that wait in a circle and what for.
    """
    out = messages_out(schedule)
    heads = [0] * schedule.num_ranks  # actions run, so that a row's posted receives reach heads + receive_ahead
    sending: list[list[tuple[Route, StageMessage]]] = [[] for _ in schedule.actions]
    progress = True
    while progress:
        progress = False
        for row, line in enumerate(schedule.actions):
            waiting = [
                entry for entry in sending[row] if not _posted(schedule, entry[1], heads, sending, receive_ahead)
            ]
            progress |= len(waiting) < len(sending[row])
            sending[row] = waiting
            if waiting or heads[row] == len(line):
                continue
            action = line[heads[row]]
            if all(at < heads[source] for _, (source, at) in dependencies.located_needs(schedule, action)):
                sending[row] = list(out.get(action.key, ()))
                heads[row] += 1
                progress = True
    if any(sending) or any(head < len(line) for head, line in zip(heads, schedule.actions, strict=True)):
        raise ValueError(_deadlock(schedule, heads, sending, receive_ahead))


def receive_ahead_needed(schedule: Schedule) -> int:
    """The fewest receives posted ahead with which the schedule passes ``check_deadlock``.

    1F1B needs 1, GPipe 0. Schedules that split the backward over several stages a rank need more.
    """
    low, high = 0, max(map(len, schedule.actions))  # with every receive posted no send waits
    while low < high:
        middle = (low + high) // 2
        try:
            check_deadlock(schedule, middle)
            high = middle
        except ValueError:
            low = middle + 1
    return low


def _posted(
    schedule: Schedule,
    message: StageMessage,
    heads: list[int],
    sending: list[list[tuple[Route, StageMessage]]],
    receive_ahead: int,
) -> bool:
    row, at = schedule.location[message.consumer.key]
    ahead = (
        receive_ahead if sending[row] else max(receive_ahead, 1)
    )  # a row that waits to run has posted its own receives
    return at < heads[row] + ahead


def _deadlock(
    schedule: Schedule, heads: list[int], sending: list[list[tuple[Route, StageMessage]]], receive_ahead: int
) -> str:
    waits = []
    for row, line in enumerate(schedule.actions):
        if sending[row]:
            channel, message = sending[row][0]
            waits.append(f"row {row} sends the result of {message.producer} to row {channel.target}")
        elif heads[row] < len(line):
            waits.append(f"row {row} waits to run {line[heads[row]]}")
    return (
        f"Schedule {schedule.name!r} stops under rendezvous sends with receive_ahead={receive_ahead}: "
        f"{'; '.join(waits)}. Post more receives ahead, or reorder the rows."
    )
