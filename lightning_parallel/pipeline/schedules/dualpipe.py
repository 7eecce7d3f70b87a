"""DualPipe and DualPipeV: two streams of micro-batches, a forward of one beside a backward of the other.

The one idea: where a row has F and right after it B of the other stream, the two may run as one (``Schedule.paired``),
each hiding the other's communication. Both are stated in DeepSeek's eight steps with h the distance to the nearer end
of the pipeline: one generator, two placements.
"""

from __future__ import annotations

from collections import Counter, deque

from lightning_parallel.pipeline.schedule import Action, Kind, Schedule
from lightning_parallel.pipeline.schedules.placement import Placement, both_ways, vee
from lightning_parallel.pipeline.schedules.spec import require


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two copies of the model, laid up and down the ranks, fed from both ends at once.

    Rank r holds stage r of replica 0 and stage D - 1 - r of replica 1. Replica 0 takes the even micro-batches, replica
    1 the odd ones. The bubble is ``(D/2 - 1)(F&B + B - 3W)`` of time with F&B the time of a pair; weights are held
    twice and their gradients summed over the replicas; rank r holds up to D + 1 activations.

    Args:
        num_ranks: D, even.
        num_microbatches: M. With fewer than 2D, or an odd number, the order is that for the next even number >= 2D
            with the missing ones left out.

    Raises:
        ValueError: D is odd.

    Example:
        >>> print(dualpipe(2, 4).to_text())
        0F0 1F1r1 0F2 1B1r1 1F3r1&0B0 1B3r1 0I2 0W2
        0F1r1 1F0 0F3r1 1B0 1F2&0B1r1 1B2 0I3r1 0W3r1

    Source:
        DeepSeek-V3, arXiv 2412.19437, section 3.2.1, and github.com/deepseek-ai/DualPipe.
    """
    require("dualpipe", num_ranks % 2 == 0, f"got {num_ranks} ranks", "Use an even number of ranks, or dualpipe_v.")
    total = max(2 * num_ranks, num_microbatches + num_microbatches % 2)
    rows, paired = [], set()
    for rank in range(num_ranks):
        up = _Stream(rank, replica=0, step=2)
        down = _Stream(num_ranks - 1 - rank, replica=1, step=2, first=1)
        first, second = (up, down) if rank < num_ranks // 2 else (down, up)
        row = _Row((first, second), num_microbatches)
        row.write(num_ranks // 2, min(rank, num_ranks - 1 - rank), total // 2)
        rows.append(tuple(row.actions))
        paired |= row.paired
    held = {pair: rank for pair, rank in both_ways(num_ranks).items() if pair[0] < num_microbatches}  # of those used
    return _schedule("dualpipe", rows, held, num_microbatches, paired)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe cut in half: rank r holds stages r and 2D - 1 - r of one model, which a micro-batch passes in a V.

    The bubble is that of DualPipe on twice the ranks, ``(D - 1)(F&B + B - 3W)`` of time for stages half as large. The
    weights are held once; rank 0 has both the input and the loss.

    Args:
        num_ranks: D.
        num_microbatches: M. With fewer than 2D the order is that for 2D with the missing ones left out.

    Example:
        >>> print(dualpipe_v(2, 4).to_text())
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 2I3 1I3 2W3 1W3

    Source:
        github.com/deepseek-ai/DualPipe; the order is that of torch's ``ScheduleDualPipeV``.
    """
    total = max(2 * num_ranks, num_microbatches)
    rows, paired = [], set()
    for rank in range(num_ranks):
        row = _Row((_Stream(rank), _Stream(2 * num_ranks - 1 - rank)), num_microbatches)
        row.write(num_ranks, rank, total)
        rows.append(tuple(row.actions))
        paired |= row.paired
    return _schedule("dualpipe_v", rows, vee(num_ranks), num_microbatches, paired)


def _schedule(
    name: str, rows: list[tuple[Action, ...]], placement: Placement, num_microbatches: int, paired: set[Action]
) -> Schedule:
    return Schedule(name, tuple(rows), placement, num_microbatches, paired=frozenset(paired))


class _Stream:
    """One of the two streams that a rank serves: its stage, and the next micro-batch of each kind."""

    def __init__(self, stage: int, replica: int = 0, step: int = 1, first: int = 0) -> None:
        self.stage, self.replica, self.step, self.first = stage, replica, step, first
        self.done: Counter[str] = Counter()

    def next(self, kind: Kind) -> Action:
        counter = "F" if kind == "F" else "B"  # B and I count together
        microbatch = self.first + self.step * self.done[counter]
        self.done[counter] += 1
        return Action(kind, self.stage, microbatch, self.replica)


class _Row:
    """Writes the actions of one rank, leaving out micro-batches that the step does not have."""

    def __init__(self, streams: tuple[_Stream, _Stream], num_microbatches: int) -> None:
        self.streams, self.num_microbatches = streams, num_microbatches
        self.actions: list[Action] = []
        self.paired: set[Action] = set()
        self.waiting: deque[Action] = deque()  # weight gradients

    def write(self, half: int, h: int, chunks: int) -> None:
        """The eight steps; ``half`` is D/2, ``chunks`` the micro-batches of a stream."""
        outer = half - 1 - h
        self.repeat(2 * outer, "F0")
        self.repeat(h + 1, "F0 F1")
        self.repeat(outer, "I1 W F1")
        main = chunks - 2 * half + h + 1
        # The middle ranks do not pair the first two, which makes the bubble smaller still.
        self.repeat(1, "F0 B1 F1&B0" if outer == 0 else "F0&B1 F1&B0")
        self.repeat(main - 1, "F0&B1 F1&B0")
        self.repeat(outer, "B1 F1&B0")
        whole = h + 1  # of the 2(h + 1) backwards of this step; the others are split
        kinds = ["B"] * whole + ["I"] * (h + 1)
        self.repeat(1, " ".join(f"{kind}{1 - at % 2}" for at, kind in enumerate(kinds)))
        self.repeat(outer, "W I0")
        self.repeat(h + 1, "W")

    def repeat(self, times: int, words: str) -> None:
        for word in words.split() * times:
            forward, _, backward = word.partition("&")
            first = self.add(forward)
            second = self.add(backward) if backward else None
            if first and second:
                self.paired.add(first)

    def add(self, word: str) -> Action | None:
        if word == "W":
            action = self.waiting.popleft()
        else:
            action = self.streams[int(word[1])].next(word[0])  # type: ignore[arg-type]
        if word[0] == "I":
            self.waiting.append(Action("W", action.stage, action.microbatch, action.replica))
        if action.microbatch >= self.num_microbatches:
            return None
        self.actions.append(action)
        return action
