"""Proofs that a schedule runs to its end, in words where it does not.

``check`` looks for, in this order: stages without a row or edges that lead backwards (placement); work that is missing
or doubled (completeness); an action before what it needs (``dependencies`` holds the rules); values that arrive in
another order than they are used (FIFO); rows that wait for each other in sends (deadlock).

The deadlock rule assumes *rendezvous* sends: a send ends when its receive is posted, which is what NCCL and large
messages do, while small messages over sockets are buffered and hide the mistake. A row runs an action, then sends its
results, and while it waits there it has posted the receives of its next ``receive_ahead`` actions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from lightning_parallel.pipeline import dependencies

if TYPE_CHECKING:
    from lightning_parallel.pipeline.schedule import Action, Schedule


class Message(NamedTuple):
    """A value that leaves a row: made by ``producer``, used by ``consumer`` on another row."""

    producer: Action
    consumer: Action


class Channel(NamedTuple):
    """Messages of one channel keep their order: activations (forward) and gradients (backward) have one each."""

    source: int
    target: int
    direction: str


def check(schedule: Schedule, receive_ahead: int = 2) -> None:
    """Raise ``ValueError`` unless the schedule is placed, complete, ordered, FIFO and free of deadlock."""
    check_placement(schedule)
    check_completeness(schedule)
    _ = schedule.order  # raises when an action comes before what it needs
    check_fifo(schedule)
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


def messages_in(schedule: Schedule, action: Action) -> Iterator[tuple[Channel, Message]]:
    """What ``action`` receives from other rows, in the order of the schedule's edges."""
    row = schedule.row_of(action)
    direction = "forward" if action.kind == "F" else "backward"
    for producer in dependencies.sources(schedule, action):
        if schedule.row_of(producer) != row:
            yield Channel(schedule.row_of(producer), row, direction), Message(producer, action)


def messages_out(schedule: Schedule) -> dict[Action, list[tuple[Channel, Message]]]:
    """What each action (looked up by ``action.key``) sends to other rows, in the order in which it sends."""
    out: dict[Action, list[tuple[Channel, Message]]] = defaultdict(list)
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
    sent: dict[Channel, list[Message]] = defaultdict(list)
    used: dict[Channel, list[Message]] = defaultdict(list)
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


def check_deadlock(schedule: Schedule, receive_ahead: int = 2) -> None:
    """With rendezvous sends and ``receive_ahead`` posted receives, no row waits for ever.

    Raises:
        ValueError: naming the rows that wait in a circle and what for.
    """
    out = messages_out(schedule)
    heads = [0] * schedule.num_ranks  # actions run, so that a row's posted receives reach heads + receive_ahead
    sending: list[list[tuple[Channel, Message]]] = [[] for _ in schedule.actions]
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
    message: Message,
    heads: list[int],
    sending: list[list[tuple[Channel, Message]]],
    receive_ahead: int,
) -> bool:
    row, at = schedule.location[message.consumer.key]
    ahead = (
        receive_ahead if sending[row] else max(receive_ahead, 1)
    )  # a row that waits to run has posted its own receives
    return at < heads[row] + ahead


def _deadlock(
    schedule: Schedule, heads: list[int], sending: list[list[tuple[Channel, Message]]], receive_ahead: int
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
