"""A pipeline schedule as plain data: which rank does what, in which order, and proofs that it runs to its end.

The one idea: a schedule is a table of actions, one row a pipeline rank, and nothing else. The generators write it, the
checks read it, the simulator prices it, the engine runs it, the pictures and the callbacks draw and measure it: always
this one object. It says nothing of tensors, processes or time.

From top to bottom: one action and its text; the schedule; schedules as cells of text; what each action needs; what
travels between rows; the checks. They look for, in this order: stages without a row or edges that lead backwards; work
that is missing or doubled; an action before what it needs; values that arrive in another order than they are used, or
rows that wait for each other in sends.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

Kind = Literal["F", "B", "I", "W", "U"]
KINDS = ("F", "B", "I", "W", "U")

_ACTION = re.compile(r"(\d+)([FBIWU])(\d+)(?:r(\d+))?(?:s(\d+))?(?:v(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one rank: a kind, a stage and a micro-batch.

    Kinds: ``F`` forward, ``B`` whole backward, ``I`` gradient of the stage's input, ``W`` gradient of its weights
    (I and W together are B), ``U`` weight update. For U, ``microbatch`` counts the updates of the stage.

    Args:
        kind: one of F, B, I, W, U.
        stage: which stage of the model, counted along the forward.
        microbatch: which micro-batch, 0 to M-1.
        replica: which copy of the pipeline, for schedules that run two directions at once.
        slice: which piece of the sequence, or None for the whole.
        version: which weights the action reads, or None for the newest.

    Example:
        >>> str(Action("F", stage=2, microbatch=0))
        '2F0'
        >>> Action.parse("1W3r1")
        Action(kind='W', stage=1, microbatch=3, replica=1, slice=None, version=None)
    """

    kind: Kind
    stage: int
    microbatch: int
    replica: int = 0
    slice: int | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"An action's kind is one of {', '.join(KINDS)}, got {self.kind!r}.")

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch}"
        text += f"r{self.replica}" if self.replica else ""
        text += "" if self.slice is None else f"s{self.slice}"
        return text if self.version is None else f"{text}v{self.version}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Action, (self.kind, self.stage, self.microbatch, self.replica, self.slice, self.version)

    @property
    def key(self) -> Action:
        """The action without its weight version: what other actions depend on."""
        return self if self.version is None else replace(self, version=None)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form, the inverse of ``str``.

        Raises:
            ValueError: the text is not an action of computation.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text.strip()!r} is not an action. Write [stage][kind][micro-batch], such as 2F0, with kind one of "
                f"{', '.join(KINDS)}; optional suffixes are r[replica], s[slice], v[version]. "
                "Actions of communication do not belong in a schedule."
            )
        stage, kind, microbatch, replica, piece, version = match.groups()
        numbers = (int(replica or 0), None if piece is None else int(piece), None if version is None else int(version))
        return cls(cast(Kind, kind), int(stage), int(microbatch), *numbers)


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does in one training step, in order.

    Args:
        name: what the schedule is called in logs and pictures.
        actions: one tuple of actions a pipeline rank (a *row*), in the order in which the rank runs them.
        placement: which row holds which (replica, stage).
        num_microbatches: M, the micro-batches of one step.
        edges: the (source stage, destination stage) pairs between which activations travel forward and their
            gradients back. Left out, each stage feeds the next one; a skip connection adds its own pair.
        paired: forwards that may run as one with the action right after them in their row: a backward, each hiding the
            other's communication (DualPipe), or the next forward (Chimera's doubling). Who does not know of it runs
            the two one after the other.

    Example:
        >>> schedule = Schedule.from_text("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1")
        >>> schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
        (2, 2, 2)
        >>> schedule.check()
        >>> print(schedule.forward_only().to_text())
        0F0 0F1
        1F0 1F1
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    placement: Mapping[tuple[int, int], int]
    num_microbatches: int
    edges: tuple[tuple[int, int], ...] = ()
    paired: frozenset[Action] = frozenset()

    def __post_init__(self) -> None:
        edges = self.edges or tuple((stage, stage + 1) for stage in range(self.num_stages - 1))
        object.__setattr__(self, "edges", tuple((int(source), int(target)) for source, target in edges))
        object.__setattr__(self, "actions", tuple(tuple(row) for row in self.actions))
        object.__setattr__(self, "placement", dict(self.placement))

    def __hash__(self) -> int:
        return hash((self.name, self.num_ranks, self.num_stages, self.num_microbatches))

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt from its fields, so that what was derived and cached is not sent along.
        return Schedule, (self.name, self.actions, self.placement, self.num_microbatches, self.edges, self.paired)

    @property
    def num_ranks(self) -> int:
        """D, the number of rows."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """S, the pieces into which the model is cut."""
        return 1 + max((stage for _, stage in self.placement), default=-1)

    @property
    def num_replicas(self) -> int:
        """How many copies of the model's pipeline the rows hold."""
        return len({replica for replica, _ in self.placement})

    @cached_property
    def location(self) -> dict[Action, tuple[int, int]]:
        """(row, position in the row) of each action, looked up by ``action.key``."""
        return {action.key: (row, at) for row, line in enumerate(self.actions) for at, action in enumerate(line)}

    @cached_property
    def feeds(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """By stage: the stages whose activations it takes, and the stages that take its own."""
        takes: dict[int, list[int]] = {}
        gives: dict[int, list[int]] = {}
        for source, target in sorted(self.edges):
            takes.setdefault(target, []).append(source)
            gives.setdefault(source, []).append(target)
        return takes, gives

    @cached_property
    def order(self) -> tuple[Step, ...]:
        """All actions in one order that serves every dependency, with the indices of what each one needs.

        Raises:
            ValueError: the rows wait for each other in a circle, or for an action that no row has.
        """
        return topological_order(self)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Actions whose results ``action`` uses, on its own row and on others; the rules are in ``dependencies``."""
        return needs(self, action)

    def row_of(self, action: Action) -> int:
        """The row that holds the action's replica and stage."""
        return self.placement[action.replica, action.stage]

    def stages_of(self, row: int) -> tuple[tuple[int, int], ...]:
        """The (replica, stage) pairs that ``row`` holds, sorted."""
        return tuple(sorted(pair for pair, holder in self.placement.items() if holder == row))

    def of(self, *kinds: Kind, row: int | None = None) -> tuple[Action, ...]:
        """Actions of the kinds given, of all rows or of one, in row order."""
        rows = self.actions if row is None else (self.actions[row],)
        return tuple(action for line in rows for action in line if action.kind in kinds)

    def check(self, receive_ahead: int = 2) -> None:
        """Prove that the schedule runs to its end; the rules are in ``checks``.

        Args:
            receive_ahead: the receives of how many coming actions a rank has posted while it waits in a send.

        Raises:
            ValueError: in words, what is missing, misplaced, out of order or blocked.
        """
        check(self, receive_ahead)

    def forward_only(self) -> Schedule:
        """The same schedule without backwards and updates, for evaluation."""
        rows = tuple(self.of("F", row=row) for row in range(self.num_ranks))
        return replace(self, name=f"{self.name} (forward only)", actions=rows, paired=frozenset())

    @cached_property
    def num_slices(self) -> int:
        """K, into how many slices sequences are cut; 0 for whole ones."""
        return len({action.slice for row in self.actions for action in row if action.slice is not None})

    def whole(self) -> Schedule:
        """The same order for whole sequences: each action takes the place of that of its first slice.

        Example:
            >>> print(Schedule.from_text("0F0s0 0F0s1 0F1s0 0F1s1 0B1s1 0B1s0 0B0s1 0B0s0").whole().to_text())
            0F0 0F1 0B1 0B0
        """
        rows = tuple(tuple(dict.fromkeys(replace(action, slice=None) for action in row)) for row in self.actions)
        return replace(self, name=f"{self.name} (whole sequences)", actions=rows) if self.num_slices else self

    def first(self, num_microbatches: int) -> Schedule:
        """The same order for the first micro-batches only: for a batch with too few rows for all of them.

        Raises:
            ValueError: more are asked for than the schedule has.
        """
        if num_microbatches > self.num_microbatches:
            raise ValueError(
                f"Schedule {self.name!r} has {self.num_microbatches} micro-batches, not {num_microbatches}."
            )
        kept = tuple(tuple(a for a in row if a.kind == "U" or a.microbatch < num_microbatches) for row in self.actions)
        if kept == self.actions:
            return self
        partners = {pair for row in self.actions for pair in pairwise(row)}
        paired = self.paired & {pair[0].key for row in kept for pair in pairwise(row) if pair in partners}
        return replace(self, actions=kept, num_microbatches=num_microbatches, paired=paired)

    def to_text(self) -> str:
        """One line a row, actions apart by a space."""
        return "\n".join(" ".join(write_cells(self, row, "{}&{}")) for row in range(self.num_ranks))

    @classmethod
    def from_text(cls, text: str, name: str = "text", edges: tuple[tuple[int, int], ...] = ()) -> Schedule:
        """Read rows apart by a new line or a slash, actions apart by blanks or commas."""
        lines = [line for line in text.replace("/", "\n").splitlines() if line.strip()]
        return _from_cells(name, [line.replace(",", " ").split() for line in lines], edges)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write one line a row, as ``torch.distributed.pipelining`` writes and reads its compute-only schedules."""
        with open(path, "w", newline="") as file:
            rows = (write_cells(self, row, "({};{})OVERLAP_F_B") for row in range(self.num_ranks))
            csv.writer(file).writerows(rows)

    @classmethod
    def from_csv(cls, path: str | PathLike[str], edges: tuple[tuple[int, int], ...] = ()) -> Schedule:
        """Read a compute-only CSV; stages lie where their actions are, M is what the actions count.

        Empty cells, by which torch pads its rows to a time grid, are skipped: the order is what counts. Torch's
        pairs ``(0F4;3B2)OVERLAP_F_B`` are two actions in that order, paired. The file does not hold ``edges``.

        Raises:
            ValueError: a cell is not an action of computation, or a stage is run by two rows.
        """
        with open(path, newline="") as file:
            cells = [[cell for cell in row if cell.strip()] for row in csv.reader(file)]
        while cells and not cells[-1]:
            cells.pop()
        return _from_cells(Path(path).stem, cells, edges)


def _from_cells(name: str, cells: Iterable[Iterable[str]], edges: tuple[tuple[int, int], ...]) -> Schedule:
    rows: list[tuple[Action, ...]] = []
    paired: set[Action] = set()
    for row in cells:
        groups = [[Action.parse(text) for text in read_cell(cell)] for cell in row]
        rows.append(tuple(action for group in groups for action in group))
        paired |= {group[0].key for group in groups if len(group) > 1}
    placement = placement_of(name, rows)
    microbatches = {action.microbatch for row in rows for action in row if action.kind != "U"}
    return Schedule(name, tuple(rows), placement, 1 + max(microbatches, default=-1), edges, frozenset(paired))


_PAIR = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")


def write_cells(schedule: Schedule, row: int, pair: str) -> Iterator[str]:
    """The cells of a row; ``pair`` is the format of two actions that run as one."""
    line = iter(schedule.actions[row])
    for action in line:
        yield pair.format(action, next(line)) if action.key in schedule.paired else str(action)


def read_cell(cell: str) -> list[str]:
    """The text of each action in a cell: one, or the two of a pair."""
    match = _PAIR.fullmatch(cell.strip())
    return list(match.groups()) if match else cell.split("&")


def placement_of(name: str, rows: Iterable[Iterable[Action]]) -> dict[tuple[int, int], int]:
    """Each (replica, stage) on the row where its actions are.

    Raises:
        ValueError: two rows run one stage of one replica, or there are no actions.
    """
    placement: dict[tuple[int, int], int] = {}
    for index, row in enumerate(rows):
        for action in row:
            first = placement.setdefault((action.replica, action.stage), index)
            if first != index:
                raise ValueError(
                    f"Schedule {name!r} runs stage {action.stage} of replica {action.replica} on row {first} and, "
                    f"with {action}, on row {index}. A stage lies on one row; give the second copy a replica (r1)."
                )
    if not placement:
        raise ValueError(f"Schedule {name!r} has no actions.")
    return placement


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
    for producer in sources(schedule, action):
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
            if all(at < heads[source] for _, (source, at) in located_needs(schedule, action)):
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


__all__ = [
    "KINDS",
    "Action",
    "Kind",
    "Schedule",
    "check",
    "check_completeness",
    "check_deadlock",
    "check_fifo",
    "check_placement",
    "receive_ahead_needed",
]
