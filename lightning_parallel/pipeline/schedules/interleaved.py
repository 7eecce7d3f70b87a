"""Several stages a rank, laid in loops: a bubble v times smaller for v times the messages.

``interleaved_1f1b`` alternates forwards and backwards of its stages, ``looped_bfs`` runs all micro-batches through one
stage before the next one, ``interleaved_zb`` is the first with its backwards split.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_parallel.pipeline.schedule import Action, Schedule
from lightning_parallel.pipeline.schedules.placement import loop
from lightning_parallel.pipeline.schedules.spec import require, write

Unit = tuple[int, int]  # (chunk, micro-batch)


def interleaved_1f1b(num_ranks: int, num_microbatches: int, v: int = 2, group: int = 0) -> Schedule:
    """Each rank holds v stages and runs groups of micro-batches through them in turn, one forward, one backward.

    Rank r holds stages r, r + D, ... (its chunks). Micro-batches go in groups of G: G micro-batches through chunk 0,
    then the same through chunk 1, and so on; backwards take the chunks in reverse. Rank r warms up with
    ``2(D - 1 - r) + (v - 1) G`` forwards, then alternates. With M divisible by D the bubble is
    ``(D - 1) / (v M + D - 1)`` (``(1/v)(D - 1)/M`` of the ideal time), with v times the messages of 1F1B.

    Args:
        num_ranks: D.
        num_microbatches: M; fewer than D are one group.
        v: stages a rank.
        group: G. The last group may have fewer micro-batches, but at least D. Left at 0, the smallest G >= D that
            allows this: D where D divides M.

    Raises:
        ValueError: v is below 1; ``group`` is below D, or leaves fewer than D for the last group.

    Example:
        >>> print(interleaved_1f1b(2, 2).to_text())
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Source:
        Narayanan et al., arXiv 2104.04473, section 2.2.2; uneven groups as in Megatron-LM's
        ``microbatch_group_size_per_vp_stage``.
    """
    name = _name("interleaved_1f1b", v, group)
    size = _group_size(name, num_ranks, num_microbatches, v, group)
    forwards = list(_units(num_microbatches, v, size))
    rows = []
    for rank in range(num_ranks):
        warmup = min(len(forwards), 2 * (num_ranks - 1 - rank) + (v - 1) * size)
        rows.append(tuple(_one_f_one_b(rank, num_ranks, v, forwards, warmup)))
    return Schedule(name, tuple(rows), loop(num_ranks, v), num_microbatches)


def interleaved_zb(num_ranks: int, num_microbatches: int, v: int = 2, group: int = 0) -> Schedule:
    """Interleaved 1F1B whose backwards are split: weight gradients fill what the warm-up left empty.

    Rank r warms up with ``(D - 1 - r) + (v - 1) G`` forwards, D - 1 - r fewer than interleaved 1F1B, since an input
    gradient returns sooner than a whole backward. It then alternates F and I; W of the oldest I follows each from the
    r-th on. At v = 1 this is ZB-H1.

    Args:
        num_ranks: D.
        num_microbatches: M.
        v: stages a rank.
        group: as of ``interleaved_1f1b``.

    Raises:
        ValueError: as of ``interleaved_1f1b``.

    Example:
        >>> print(interleaved_zb(2, 2).to_text())
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

    Source:
        ``ScheduleInterleavedZeroBubble`` of torch.distributed.pipelining, after Qi et al., arXiv 2401.10241.
    """
    name = _name("interleaved_zb", v, group)
    size = _group_size(name, num_ranks, num_microbatches, v, group)
    forwards = list(_units(num_microbatches, v, size))
    rows = []
    for rank in range(num_ranks):
        warmup = min(len(forwards), num_ranks - 1 - rank + (v - 1) * size)
        whole = list(_one_f_one_b(rank, num_ranks, v, forwards, warmup))
        rows.append(tuple(_split(whole, lag=rank)))
    return Schedule(name, tuple(rows), loop(num_ranks, v), num_microbatches)


def looped_bfs(num_ranks: int, num_microbatches: int, v: int = 2) -> Schedule:
    """Each rank runs all micro-batches through one of its v stages before it turns to the next.

    Rank r holds stages r, r + D, ...; forwards stage by stage, then backwards stage by stage from the last, each in
    reverse micro-batch order, as torch does (Fast-LLM keeps the order of the forwards). The bubble of interleaved
    1F1B, all M micro-batches held, and every stage's parameters used in one stretch forward and one backward: the
    schedule that gathers sharded parameters the fewest times.

    Args:
        num_ranks: D.
        num_microbatches: M; below D the bubble is larger than the formula's.
        v: stages a rank.

    Raises:
        ValueError: v is below 1.

    Example:
        >>> print(looped_bfs(2, 2).to_text())
        0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
        1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0

    Source:
        Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953; ``ScheduleLoopedBFS`` of torch.
    """
    name = _name("looped_bfs", v, 0)
    require(name, v >= 1, f"got v={v} stages a rank", "Use 1 or more.")
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * v, num_ranks)
        forwards = [Action("F", stage, m) for stage in stages for m in range(num_microbatches)]
        rows.append((*forwards, *(Action("B", action.stage, action.microbatch) for action in reversed(forwards))))
    return Schedule(name, tuple(rows), loop(num_ranks, v), num_microbatches)


def _name(name: str, v: int, group: int) -> str:
    return write(name, ({"v": v} if v != 2 else {}) | ({"group": group} if group else {}))


def _group_size(name: str, num_ranks: int, num_microbatches: int, v: int, group: int) -> int:
    require(name, v >= 1, f"got v={v} stages a rank", "Use 1 or more.")
    if num_microbatches <= num_ranks and not group:
        return num_microbatches
    if group:
        rest = num_microbatches % group if group > 0 else 0
        fits = group >= num_ranks and (rest == 0 or rest >= num_ranks)
        what = f"got group={group} for {num_microbatches} micro-batches on {num_ranks} ranks, which leaves {rest}"
        require(name, fits, what, f"Groups, and what is left for the last one, are {num_ranks} or more.")
        return group
    sizes = range(num_ranks, num_microbatches + 1)
    return next(s for s in sizes if num_microbatches % s == 0 or num_microbatches % s >= num_ranks)


def _units(num_microbatches: int, v: int, size: int) -> Iterator[Unit]:
    """What a rank forwards, in order: a group of micro-batches through every chunk, then the next group."""
    for first in range(0, num_microbatches, size):
        for chunk in range(v):
            for microbatch in range(first, min(first + size, num_microbatches)):
                yield chunk, microbatch


def _one_f_one_b(rank: int, num_ranks: int, v: int, forwards: list[Unit], warmup: int) -> Iterator[Action]:
    """Forwards in order and, from ``warmup`` on, backwards in the same order with the chunks reversed."""
    for slot in range(len(forwards) + warmup):
        if slot < len(forwards):
            chunk, microbatch = forwards[slot]
            yield Action("F", rank + chunk * num_ranks, microbatch)
        if slot >= warmup:
            chunk, microbatch = forwards[slot - warmup]
            yield Action("B", rank + (v - 1 - chunk) * num_ranks, microbatch)


def _split(actions: list[Action], lag: int) -> Iterator[Action]:
    """Every B becomes an I; after the I's from number ``lag`` on, the W of the oldest I that waits."""
    waiting: list[Action] = []
    count = 0
    for action in actions:
        if action.kind == "F":
            yield action
            continue
        yield Action("I", action.stage, action.microbatch)
        waiting.append(Action("W", action.stage, action.microbatch))
        if count >= lag:
            yield waiting.pop(0)
        count += 1
    yield from waiting
