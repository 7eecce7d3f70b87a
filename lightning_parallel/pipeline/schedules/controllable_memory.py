"""V-Half and V-Min: a half and a third of 1F1B's activations, from a pattern that every micro-batch repeats.

The one idea: if each micro-batch runs the same pattern, six slots after the one before, then how long a stage's
activations live, and so the memory, can be chosen by the pattern. Warm-up and drain of the plain repetition leave
bubbles; passes are moved into them as far as the memory allows. Times are slots of one forward; an order is what comes
out of them. Left out: patterns between the two, and the authors' search over patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate

from lightning_parallel.pipeline.schedule import Action, Kind, Schedule
from lightning_parallel.pipeline.schedules.placement import vee

PERIOD = 6  # slots between two micro-batches: F, I and W of two stages
OUT_F, BACK_F, BACK_I, OUT_I, WEIGHT = range(5)  # passes of a micro-batch on a rank, in order; OUT is the first stage
Slots = list[list[int]]  # of one rank: by pass, the slot of each micro-batch


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank in a V, half of 1F1B's activations as D grows.

    On rank r the passes of a micro-batch (F of both stages, then I of both) stand at slots
    ``2r, 3D - r - 2, 3D + q + 2r - 1, 6D + q - r - 2`` with q = 3 if D is even, else 0; the next micro-batch follows 6
    slots later, W fills the gaps. The bubble is about half of 1F1B's at T_F = T_I = T_W.

    Args:
        num_ranks: D.
        num_microbatches: M.

    Example:
        >>> print(v_half(2, 2).to_text())
        0F0 0F1 3F0 3I0 3W0 3F1 0I0 3I1 3W1 0W0 0I1 0W1
        1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1

    Source:
        Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362; offsets and reordering as in the
        authors' ``zbv_greedy.py``.
    """
    gap = 3 if num_ranks % 2 == 0 else 0
    pattern = (
        (2 * r, 3 * num_ranks - r - 2, 3 * num_ranks + gap + 2 * r - 1, 6 * num_ranks + gap - r - 2)
        for r in range(num_ranks)
    )
    return _schedule("v_half", tuple(pattern), num_microbatches)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank in a V, a third of 1F1B's activations as D grows.

    As ``v_half``, with slots ``r, 2D - r - 1, 2D + q + r, 4D + q - r - 1``, q = 2 if D is divisible by 3, else 0. The
    bubble is about two thirds of 1F1B's at T_F = T_I = T_W, and grows where these differ.

    Args:
        num_ranks: D.
        num_microbatches: M.

    Example:
        >>> from lightning_parallel.pipeline.simulator import peak_activations
        >>> peak_activations(v_min(4, 8))
        [2, 2, 2, 2]

    Source:
        As of ``v_half``.
    """
    gap = 2 if num_ranks % 3 == 0 else 0
    pattern = (
        (r, 2 * num_ranks - r - 1, 2 * num_ranks + gap + r, 4 * num_ranks + gap - r - 1) for r in range(num_ranks)
    )
    return _schedule("v_min", tuple(pattern), num_microbatches)


def _schedule(name: str, pattern: tuple[tuple[int, ...], ...], num_microbatches: int) -> Schedule:
    num_ranks = len(pattern)
    rows = tuple(
        tuple(_actions(slots, rank, 2 * num_ranks - 1 - rank))
        for rank, slots in enumerate(_reordered(pattern, num_microbatches))
    )
    return Schedule(name, rows, vee(num_ranks), num_microbatches)


def _actions(slots: Slots, out: int, back: int) -> Iterator[Action]:
    """The order of a rank's passes, each gap filled with a W; those of the stage on the way back go first."""
    passes: dict[int, tuple[Kind, int]] = {
        OUT_F: ("F", out),
        BACK_F: ("F", back),
        BACK_I: ("I", back),
        OUT_I: ("I", out),
    }
    at_slot = {slot: (*passes[kind], m) for kind in passes for m, slot in enumerate(slots[kind])}
    owed: dict[int, list[int]] = {back: [], out: []}
    for slot in range(max(at_slot) + 1):
        if slot in at_slot:
            kind, stage, microbatch = at_slot[slot]
            yield Action(kind, stage, microbatch)
            if kind == "I":
                owed[stage].append(microbatch)
        elif waits := [stage for stage, waiting in owed.items() if waiting]:
            yield Action("W", waits[0], owed[waits[0]].pop(0))
    for stage, waiting in owed.items():
        yield from (Action("W", stage, microbatch) for microbatch in waiting)


@lru_cache(maxsize=64)
def _reordered(pattern: tuple[tuple[int, ...], ...], num_microbatches: int) -> list[Slots]:
    """Slots of all passes but W, on all ranks: the pattern repeated, then moved twice."""
    repeated = [[[first + PERIOD * m for m in range(num_microbatches)] for first in row] for row in pattern]
    moved = _moved([[*slots, _weight_slots(slots)] for slots in repeated], held_with_weights, from_start=True)
    again = _moved([slots[:WEIGHT] for slots in _squeezed(moved)], held_without_weights, from_start=False)
    return [slots[:WEIGHT] for slots in _squeezed([[*slots, _weight_slots(slots)] for slots in again])]


def _weight_slots(slots: Slots) -> list[int]:
    """W in the first free slots after the I's, the rest at the end."""
    taken = {slot: kind for kind, line in enumerate(slots) for slot in line}
    found, owed, end = [], 0, max(taken)
    for slot in range(end + 1):
        if slot in taken:
            owed += taken[slot] in (BACK_I, OUT_I)
        elif owed:
            found.append(slot)
            owed -= 1
    return found + list(range(end + 1, end + 1 + owed))


def held_with_weights(slots: Slots) -> int:
    """Most activations a rank holds: F stores, W frees."""
    change = [0] * (1 + max(line[-1] for line in slots))
    for kind, line in enumerate(slots):
        for slot in line:
            change[slot] = {OUT_F: 1, BACK_F: 1, WEIGHT: -1}.get(kind, 0)
    return max(accumulate(change))


def held_without_weights(slots: Slots) -> int:
    """Most activations a rank holds if every free slot is used by a W that is owed."""
    kinds = [-1] * (1 + max(line[-1] for line in slots))
    for kind, line in enumerate(slots):
        for slot in line:
            kinds[slot] = kind
    held = most = owed = 0
    for kind in kinds:
        if kind < 0:
            held, owed = (held - 1, owed - 1) if owed else (held, owed)
        elif kind in (OUT_F, BACK_F):
            held += 1
            most = max(most, held)
        else:
            owed += 1
    return most


def _in_order(ranks: list[Slots]) -> list[tuple[int, int, int, int]]:
    """(slot, rank, pass, micro-batch) of everything, in time."""
    return sorted(
        (slot, rank, kind, m)
        for rank, slots in enumerate(ranks)
        for kind, line in enumerate(slots)
        for m, slot in enumerate(line)
    )


def _before(ranks: list[Slots], rank: int, kind: int, microbatch: int) -> Iterator[tuple[int, int, int]]:
    """(rank, pass, micro-batch) of what a pass other than W follows."""
    neighbour = rank - 1 if kind in (OUT_F, BACK_I) else rank + 1
    if kind != WEIGHT and 0 <= neighbour < len(ranks):
        yield neighbour, kind, microbatch
    if OUT_F < kind < WEIGHT:
        yield rank, kind - 1, microbatch
    if microbatch:
        yield rank, kind, microbatch - 1


def _moved(ranks: list[Slots], held: Callable[[Slots], int], from_start: bool) -> list[Slots]:
    """Each pass in turn at the earliest free slot that does not raise the memory; the steady state stays as it is.

    The steady state lasts from the first return to rank 0 to the first forward of the last micro-batch. What comes
    before is moved if ``from_start``.
    """
    limit = max(map(held, ranks))
    last, phase = len(ranks[0][0]) - 1, 0
    taken: list[set[int]] = [set() for _ in ranks]
    for slot, rank, kind, m in _in_order(ranks):
        if phase == 0 and (kind, rank) == (OUT_I, 0):
            phase = 1
        stays = phase == 1 or (phase == 0 and not from_start)
        if phase == 1 and (kind, m) == (OUT_F, last):
            phase = 2
        if not stays:
            _move(ranks, rank, kind, m, taken[rank], lambda slots: held(slots) <= limit)
        taken[rank].add(ranks[rank][kind][m])
        assert ranks[rank][kind][m] <= slot
    return ranks


def _move(
    ranks: list[Slots], rank: int, kind: int, microbatch: int, taken: set[int], fits: Callable[[Slots], bool]
) -> None:
    slots = ranks[rank]
    now = slots[kind][microbatch]
    after = [ranks[r][k][m] for r, k, m in _before(ranks, rank, kind, microbatch)]
    if kind == WEIGHT:
        after.append(sorted(slots[BACK_I] + slots[OUT_I])[microbatch])
    for candidate in range(max(after, default=-1) + 1, now):
        if candidate not in taken:
            slots[kind][microbatch] = candidate
            if fits(slots):
                return
    slots[kind][microbatch] = now


def _squeezed(ranks: list[Slots]) -> list[Slots]:
    """The same order with every pass as early as what it follows allows."""
    early: list[Slots] = [[[] for _ in slots] for slots in ranks]
    free = [0] * len(ranks)
    for _, rank, kind, m in _in_order(ranks):
        after = [early[r][k][n] + 1 for r, k, n in _before(ranks, rank, kind, m)]
        early[rank][kind].append(max([free[rank], *after]))
        free[rank] = early[rank][kind][-1] + 1
    return early
