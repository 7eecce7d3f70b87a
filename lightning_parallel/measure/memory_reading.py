"""The memory of all ranks in one measured step, beside what the schedule promises: log keys and words.

The one idea: what a schedule promises is a number of micro-batches whose activations a rank holds at a time. Measured
bytes are brought to that unit by dividing by what the rank's forwards save for one micro-batch, so that both can be
compared on every rank whatever its blocks are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_parallel.measure.memory import CATEGORIES, RankMemory
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.simulator import peak_activations

STATES = ("parameters", "gradients", "optimizer")  # what ZeRO divides
MOVING = ("gradients", "activations", "other")  # whose peak may differ from what is there at the step's end


class ExpectedActivations(NamedTuple):
    """What a schedule says of a rank: its row, the micro-batches of a step, and the most activations held at a time."""

    row: int
    microbatches: int
    activations: float

    @classmethod
    def of(cls, schedule: Schedule, row: int) -> ExpectedActivations:
        """What the schedule says of one of its rows.

        Example:
            >>> from lightning_parallel.pipeline.schedules import make
            >>> ExpectedActivations.of(make("1f1b", num_ranks=4, num_microbatches=8), row=1)
            ExpectedActivations(row=1, microbatches=8, activations=3)
        """
        return cls(row, schedule.num_microbatches, peak_activations(schedule)[row])


class ExpectedStates(NamedTuple):
    """What a stage of ZeRO says of a rank: its name, bytes by kind by the formula, and with padding and the like."""

    name: str
    formula: Mapping[str, float]
    expected: Mapping[str, int]


@dataclass(frozen=True)
class MemoryReading:
    """One training step on all ranks.

    Args:
        step: how many optimizer steps had been taken when it ended.
        ranks: memory by global rank.
        schedule: what the ranks ran, None without a pipeline.
        promises: what the schedule says of each rank, by global rank.
        states: what a stage of ZeRO says of each rank's model states, by global rank.
    """

    step: int
    ranks: Mapping[int, RankMemory]
    schedule: Schedule | None = None
    promises: Mapping[int, ExpectedActivations] = field(default_factory=dict)
    states: Mapping[int, ExpectedStates] = field(default_factory=dict)

    @property
    def fullest(self) -> int:
        """The rank with the largest peak, the first of several."""
        return max(self.ranks, key=lambda rank: self.ranks[rank].peak_bytes)

    @property
    def in_order(self) -> list[int]:
        """Ranks from the first stage to the last, as timelines show them."""
        return sorted(self.ranks, key=lambda rank: (self.promises[rank].row if rank in self.promises else 0, rank))

    def microbatches_held(self, rank: int) -> float:
        """The most activations the rank held, in what its forwards save for one micro-batch; 0 where they save nothing.

        Raises:
            ValueError: the step ran no schedule, so that there is nothing to count in.
        """
        if rank not in self.promises:
            raise ValueError("The step ran no schedule: there are no micro-batches to count activations in.")
        memory = self.ranks[rank]
        per_microbatch = memory.saved / self.promises[rank].microbatches
        return memory.held / per_microbatch if per_microbatch else 0.0

    def metrics(self) -> dict[str, float]:
        """The reading under its log keys, bytes: those of the rank that has most, and each rank's own."""
        of = list(self.ranks.values())
        values = {f"parallel/memory_{kind}": max(memory.current[kind] for memory in of) for kind in CATEGORIES}
        values |= {f"parallel/memory_{kind}_peak": max(memory.peak[kind] for memory in of) for kind in MOVING}
        values["parallel/memory_current"] = max(memory.current_bytes for memory in of)
        values["parallel/memory_peak"] = max(memory.peak_bytes for memory in of)
        for rank, memory in self.ranks.items():
            values[f"parallel/memory_peak/rank_{rank}"] = memory.peak_bytes
            values[f"parallel/memory_activations_peak/rank_{rank}"] = memory.peak["activations"]
        beside = self._beside_the_schedule() | self._beside_the_formula()
        return {key: float(value) for key, value in values.items()} | beside

    def _beside_the_formula(self) -> dict[str, float]:
        values = {}
        for kind in STATES if self.states else ():
            values[f"parallel/memory_{kind}_formula"] = max(promise.formula[kind] for promise in self.states.values())
            for rank, promise in self.states.items():
                values[f"parallel/memory_{kind}/rank_{rank}"] = float(self.ranks[rank].current[kind])
                values[f"parallel/memory_{kind}_expected/rank_{rank}"] = float(promise.expected[kind])
        return values

    def _beside_the_schedule(self) -> dict[str, float]:
        key = "parallel/memory_activations_microbatches"
        values = {}
        for rank, promise in self.promises.items():
            values[f"{key}/rank_{rank}"] = self.microbatches_held(rank)
            values[f"{key}_expected/rank_{rank}"] = float(promise.activations)
        return values

    def summary(self) -> str:
        """The reading for people: a line for the fullest rank, and one for the schedule's promise."""
        memory = self.ranks[self.fullest]
        parts = ", ".join(f"{kind} {in_words(size)}" for kind, size in memory.at_peak.items() if size)
        line = f"memory peak {in_words(memory.peak_bytes)} on rank {self.fullest} in step {self.step}: {parts}"
        lines = [line]
        if self.schedule is not None and self.promises:
            lines.append(self._schedule_in_words(self.schedule))
        return "\n".join([*lines, *([self._states_in_words()] if self.states else [])])

    def _schedule_in_words(self, schedule: Schedule) -> str:
        ranks = sorted(self.promises)
        held = ", ".join(f"{self.microbatches_held(rank):.2f}" for rank in ranks)
        promised = ", ".join(f"{self.promises[rank].activations:g}" for rank in ranks)
        return (
            f"activations of {held} micro-batches at most on ranks {', '.join(map(str, ranks))} beside "
            f"{promised} by the schedule ({schedule.name}, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} micro-batches)"
        )

    def _states_in_words(self) -> str:
        rank = self.fullest
        memory, promise = self.ranks[rank], self.states[rank]
        kinds = ", ".join(
            f"{kind} {in_words(memory.current[kind])} beside {in_words(promise.formula[kind])}" for kind in STATES
        )
        return f"model states on rank {rank} beside the formula of {promise.name}: {kinds}"


def in_words(size: float) -> str:
    """A number of bytes with three or more digits that count.

    Example:
        >>> in_words(512), in_words(3 * 2**20), in_words(5.5 * 2**30)
        ('512 B', '3.00 MiB', '5.50 GiB')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"
