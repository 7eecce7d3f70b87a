"""The schedule for given times and memory: what ``schedule="auto"`` stands on.

The one idea: every generator is asked, every answer is simulated with the times given, and the shortest step that fits
the memory wins; the reason is said in words. Pure: who measures the times, and when, is not said here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_parallel.pipeline import schedules
from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.planning.loads import Loads, even_loads
from lightning_parallel.pipeline.planning.splits import merge_useless_splits
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.simulator import Timeline, peak_activations, simulate

CANDIDATES = (
    "1f1b",
    "gpipe",
    "dapple:policy=2",
    "interleaved_1f1b",
    "interleaved_1f1b:v=3",
    "interleaved_1f1b:v=4",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "zb_1p",
    "zb_2p",
    "zb_auto",
    "interleaved_zb",
    "zb_v",
    "zb_v_auto",
    "v_half",
    "v_min",
    "dualpipe_v",
    "gems",
    "chimera",
    "chimera:pairs=2",
    "chimera:doubling=true",
    "dualpipe",
    "naive",
)
SAME = 1e-6  # relative: steps that differ by less take the same time


@dataclass(frozen=True)
class Candidate:
    """One schedule that fits or does not.

    Args:
        name: of the schedule, with its options.
        timeline: simulated with the times given; None where the schedule cannot be made.
        memory: of the fullest rank, in activations of one micro-batch on one rank.
        excuse: why it cannot be taken; empty where it can.
    """

    name: str
    timeline: Timeline | None
    memory: float
    excuse: str = ""


@dataclass(frozen=True)
class Choice:
    """What was chosen, why, and from what.

    Args:
        schedule: the best one; ``schedule.name`` makes it again where it does not depend on times.
        reason: in words, one line.
        candidates: all, those that fit first, each group from fast to slow.
        seconds: of F and B of every unit of the model, where they were measured.
    """

    schedule: Schedule
    reason: str
    candidates: tuple[Candidate, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)


def choose(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | Loads,
    memory_limit: float | None = None,
    weight_share: float = 1.0,
    weights: float | None = None,
    candidates: Sequence[str] = CANDIDATES,
) -> Choice:
    """The schedule with the shortest step among those that fit the memory; of equally fast ones, the smallest.

    Args:
        num_ranks: D.
        num_microbatches: M.
        costs: of a rank's whole share of the model, one number or one a rank, in any unit. Stages of schedules with
            several a rank take their part of it. Where whole backwards cost less than I and W, say so
            (``Costs.backward``), or splits look free. Or what says what the stages of each schedule cost and keep.
        memory_limit: the most that a rank can hold, in activations of one micro-batch on one rank (the peak of
            ``peak_activations``) plus ``weights``, or in the unit of what the loads say. None for no limit.
        weight_share: M_W / M_B, see ``peak_activations``.
        weights: weights, gradients and optimizer states of a rank's share, in the same unit; schedules of several
            replicas hold them several times. Left out, those are not considered.
        candidates: names to choose from.

    Returns:
        A ``Choice``. Splits that gain nothing at these times are merged.

    Raises:
        ValueError: nothing fits; the message names the smallest schedule and what it needs.

    Example:
        >>> choice = choose(4, 16, Costs(1.0, 1.0, 1.0), memory_limit=4)
        >>> choice.reason.split("; ")[:2]
        ['zb_v: step 49.5, idle 0.0303, holds 4 of 4', '1f1b takes 57, 1.15 times as long']
    """
    loads = even_loads(costs, num_ranks, weight_share) if isinstance(costs, Costs) else costs
    options = [_candidate(name, num_ranks, num_microbatches, loads, memory_limit, weights) for name in candidates]
    fitting = sorted((option for option in options if not option.excuse), key=_rank_by)
    others = sorted((option for option in options if option.excuse), key=lambda option: option.memory)
    if not fitting:
        told = "; ".join(f"{option.name} {option.excuse}" for option in others[:3])
        raise ValueError(
            f"No schedule for {num_ranks} ranks and {num_microbatches} micro-batches fits memory_limit={memory_limit}: "
            f"{told}. Use smaller micro-batches, recomputation or more ranks."
        )
    best = fitting[0]
    assert best.timeline is not None
    return Choice(best.timeline.schedule, _reason(best, options, memory_limit), (*fitting, *others))


def _rank_by(option: Candidate) -> tuple[float, float, int]:
    """Time, then memory, then how many backwards are split."""
    assert option.timeline is not None
    return float(f"{option.timeline.makespan:.6g}"), option.memory, len(option.timeline.schedule.of("I"))


def _candidate(
    name: str, num_ranks: int, num_microbatches: int, loads: Loads, limit: float | None, weights: float | None
) -> Candidate:
    try:
        room = None if limit is None else limit - (weights or 0.0)
        schedule = _make(name, num_ranks, num_microbatches, loads, room)
        load = loads(schedule.placement)
    except ValueError as error:
        return Candidate(name, None, float("inf"), f"cannot be made: {error}")
    schedule = merge_useless_splits(schedule, load.costs)
    copies = schedule.num_replicas
    memory = max(peak_activations(schedule, load.weight_share, load.kept)) + (weights or 0.0) * copies
    too_much = limit is not None and memory > limit * (1 + SAME)
    excuse = f"needs {memory:g}" if too_much else ""
    if copies > 1 and weights is None:
        excuse = f"holds {copies} copies of the weights, and their size is not given"
    return Candidate(schedule.name, simulate(schedule, load.costs), memory, excuse)


def _make(name: str, num_ranks: int, num_microbatches: int, loads: Loads, room: float | None) -> Schedule:
    """Generators that look at times and memory are told them: those of their stages, the memory of the largest."""
    plain = schedules.make(name, num_ranks, num_microbatches)
    if "costs" not in schedules.spec.options_of(schedules.find(name)[0]):
        return plain
    load = loads(plain.placement)
    options: dict[str, object] = {"costs": load.costs, "weight_share": load.largest_share}
    if name == "zb_auto" and room is not None:
        options["limit"] = max(1.0, room / load.largest) if load.largest else num_microbatches
    return schedules.make(name, num_ranks, num_microbatches, **options)


def _reason(best: Candidate, options: Sequence[Candidate], limit: float | None) -> str:
    assert best.timeline is not None
    time = best.timeline.makespan
    holds = f"holds {best.memory:g}" + ("" if limit is None else f" of {limit:g}")
    words = [f"{best.name}: step {time:g}, idle {best.timeline.idle:.4f}, {holds}"]
    plain = next((option for option in options if option.name == "1f1b" and option is not best), None)
    if plain and plain.timeline:
        longer = plain.timeline.makespan
        fits = "" if not plain.excuse else f" and {plain.excuse}"
        words.append(f"1f1b takes {longer:g}, {longer / time:.3g} times as long{fits}")
    faster = [o for o in options if o.excuse and o.timeline and o.timeline.makespan < time * (1 - SAME)]
    if faster:
        first = min(faster, key=_rank_by)
        assert first.timeline is not None
        words.append(f"{first.name} would take {first.timeline.makespan:g} but {first.excuse}")
    return "; ".join(words)
