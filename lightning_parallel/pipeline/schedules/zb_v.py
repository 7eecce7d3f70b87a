"""ZB-V: two stages a rank, laid in a V, no bubble at equal times in the memory of 1F1B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from lightning_parallel.pipeline.schedule import Action, Kind, Schedule
from lightning_parallel.pipeline.schedules.placement import vee


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Rank r holds stages r and 2D - 1 - r; forwards and split backwards of the two alternate in a fixed order.

    In its own span no rank waits if T_F = T_I = T_W and M >= 2D - 1. Every rank holds D activations of a full stage.
    The loss lies on rank 0, which also takes the input. With fewer micro-batches the order is that for 2D - 1 with
    the missing ones left out.

    Args:
        num_ranks: D.
        num_microbatches: M.

    Example:
        >>> print(zb_v(2, 2).to_text())
        0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
        1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1

    Source:
        Qi et al., arXiv 2401.10241, section 6; the order is that of torch's ``ScheduleZBVZeroBubble``.
    """
    rows = tuple(
        tuple(action for action in _row(rank, num_ranks, num_microbatches) if action.microbatch < num_microbatches)
        for rank in range(num_ranks)
    )
    return Schedule("zb_v", rows, vee(num_ranks), num_microbatches)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Phases in the paper's letters, upper case for the stage on the way out, lower for the one back."""
    behind, total = num_ranks - rank, max(2 * num_ranks - 1, num_microbatches)
    ahead = 2 * num_ranks - 1 - rank  # forwards of the first stage before its first backward
    phases = (
        (2 * behind - 1, "F"),
        (rank, "fF"),
        (behind, "fiw"),
        (total - ahead, "FIWfiw"),
        (behind - 1, "IWfiw"),
        (rank, "Ii"),
        (behind, "IW"),
    )
    counter = _Counter(rank, 2 * num_ranks - 1 - rank)
    for times, letters in phases:
        for letter in letters * times:
            yield counter.next(letter)
    for letter in "wW":
        while counter.done[letter] < total:
            yield counter.next(letter)


class _Counter:
    """The next action of a letter: micro-batches of each kind and stage come in order."""

    def __init__(self, out: int, back: int) -> None:
        self.out, self.back = out, back
        self.done = dict.fromkeys("FIWfiw", 0)

    def next(self, letter: str) -> Action:
        self.done[letter] += 1
        stage = self.out if letter.isupper() else self.back
        return Action(cast(Kind, letter.upper()), stage, self.done[letter] - 1)
