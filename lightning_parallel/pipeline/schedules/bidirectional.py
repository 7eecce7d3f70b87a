"""GEMS and Chimera: replicas of the model laid up and down the ranks, so that both ends have work.

The one idea: a rank that holds a late stage of one replica holds an early one of another, and works on one while it
would wait for the other. Weights are held twice (2 x ``pairs`` times), and gradients of a stage summed over its
replicas. Left out: a doubled forward as one call; two forwards with nothing between them take its place.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_parallel.pipeline.schedule import Action, Kind, Schedule
from lightning_parallel.pipeline.schedules.placement import both_ways
from lightning_parallel.pipeline.schedules.spec import require, write


def gems(num_ranks: int, num_microbatches: int) -> Schedule:
    """Micro-batches go up and down the ranks by turns, the next forward close behind the last backward.

    Replica 1 lies in reverse order. A micro-batch's backward ends on the rank on which the next one's forward, of the
    other replica, ends too: at most two are alive, and a rank holds the activations of one. Bubble about
    ``(D - 1) / (D + 1/2)`` at T_B = 2 T_F: a schedule for little memory, not for speed.

    Args:
        num_ranks: D.
        num_microbatches: M.

    Returns:
        Row r is F and B of micro-batch 0, of 1, ...; even ones on replica 0.

    Example:
        >>> print(gems(2, 2).to_text())
        0F0 0B0 1F1r1 1B1r1
        1F0 1B0 0F1r1 0B1r1

    Source:
        Jain et al., GEMS, SC 2020, as in ``gems_master.py`` of OSU's MPI4DL; the bubble is that of Chimera's table 2
        (Li and Hoefler, arXiv 2107.06925; UNVERIFIED in the paper itself).
    """
    placement = both_ways(num_ranks)
    stages = {(replica, rank): stage for (replica, stage), rank in placement.items()}
    kinds: tuple[Kind, ...] = ("F", "B")
    rows = (
        tuple(Action(kind, stages[m % 2, rank], m, replica=m % 2) for m in range(num_microbatches) for kind in kinds)
        for rank in range(num_ranks)
    )
    if num_microbatches == 1:
        placement = {(replica, stage): rank for (replica, stage), rank in placement.items() if replica == 0}
    return Schedule("gems", tuple(rows), placement, num_microbatches)


def chimera(num_ranks: int, num_microbatches: int, pairs: int = 1, doubling: bool = False) -> Schedule:
    """Pipelines in both directions at once, merged so that their slots never meet.

    A unit is D micro-batches, D / (2 ``pairs``) of them in each of 2 ``pairs`` pipelines. Micro-batch j of a pipeline
    has the forward of stage s in slot ``2j + s`` and its backward in slot ``2j + 2D - 1 - s``. Pipeline 2i goes up from
    rank ``i D / pairs`` and around, pipeline 2i + 1 comes down, mirrored. Units follow 2D slots apart, so that the next
    one begins in the empty slots of the one before. Bubble ``(D - 2) / (2M + D - 2)`` at T_B = T_F for one pair;
    activations of D/2 + 1 to D micro-batches. At T_B = 2 T_F a single unit has ``(D - 2) / (3M/2 + D - 2)``; several
    in sequence have more than that, since their slots are then of two lengths.

    Forward doubling makes them equal: a slot is two forwards or one backward. A unit is then 2D micro-batches; the two
    forwards j of a pipeline have slot ``2j + s``, backward k slot ``2k + 2D - 1 - s``, and units follow 3D slots apart.
    At T_B = 2 T_F and any number of units the bubble is ``(D - 2) / (3M/2 + D - 2)`` if a slot's forwards run as one
    (``Schedule.paired``), and ``(D - 2) / (2M + D - 2)`` if each hands on its result by itself, as the engine does.
    Twice the activations are held: up to 2D micro-batches, which is why the paper recomputes. Backward halving is the
    same order of micro-batches half as large.

    Args:
        num_ranks: D, even.
        num_microbatches: M; where D (with doubling 2D) does not divide it, the last unit lacks some.
        pairs: of pipelines, a divisor of D / 2; more pairs mean more copies of the weights and shorter waits.
        doubling: two forwards a slot, for backwards that take as long as two; with one pair only.

    Raises:
        ValueError: D is odd, ``pairs`` does not divide D / 2, or several pairs are to be doubled.

    Example:
        >>> print(chimera(2, 2).to_text())
        0F0 1F1r1 1B1r1 0B0
        0F1r1 1F0 1B0 0B1r1
        >>> print(chimera(2, 4, doubling=True).to_text())
        0F0&0F1 1F2r1&1F3r1 1B2r1 0B0 1B3r1 0B1
        0F2r1&0F3r1 1F0&1F1 1B0 0B2r1 1B1 0B3r1

    Source:
        Li and Hoefler, Chimera, SC 2021, arXiv 2107.06925, section 3. Doubling and halving: section 3.5, by its rule;
        the slots are ours (UNVERIFIED against its figure 7).
    """
    name = write("chimera", ({"pairs": pairs} if pairs != 1 else {}) | ({"doubling": True} if doubling else {}))
    require(name, num_ranks % 2 == 0, f"got {num_ranks} ranks", "Use an even number of ranks.")
    divides = pairs >= 1 and num_ranks // 2 % pairs == 0
    require(name, divides, f"got pairs={pairs} on {num_ranks} ranks", f"Use a divisor of {num_ranks // 2}.")
    require(name, pairs == 1 or not doubling, f"got pairs={pairs} with doubling", "Their slots meet: use pairs=1.")
    placement = both_ways(num_ranks, pairs)
    slots: list[dict[tuple[int, int], Action]] = [{} for _ in range(num_ranks)]
    for slot, action in _slots(num_ranks, num_microbatches, 2 * pairs, 1 + doubling):
        row = slots[placement[action.replica, action.stage]]
        assert slot not in row, f"{action} and {row[slot]} meet in slot {slot}"
        row[slot] = action
    used = {action.replica for row in slots for action in row.values()}
    held = {pair: rank for pair, rank in placement.items() if pair[0] in used}
    rows = tuple(tuple(row[slot] for slot in sorted(row)) for row in slots)
    paired = frozenset(row[at] for row in slots for at in row if at[1] == 0 and (at[0], 1) in row)
    return Schedule(name, rows, held, num_microbatches, paired=paired)


def _slots(
    num_ranks: int, num_microbatches: int, replicas: int, width: int
) -> Iterator[tuple[tuple[int, int], Action]]:
    """Every action with its slot and its place in the slot, of which a forward fills one of ``width``."""
    for microbatch in range(num_microbatches):
        unit, place = divmod(microbatch, width * num_ranks)
        group, at = divmod(place, width)
        j, replica = divmod(group, replicas)
        begin = (1 + width) * num_ranks * unit
        for stage in range(num_ranks):
            yield (begin + 2 * j + stage, at), Action("F", stage, microbatch, replica)
            last = begin + 2 * (width * j + at) + 2 * num_ranks - 1
            yield (last - stage, 0), Action("B", stage, microbatch, replica)
