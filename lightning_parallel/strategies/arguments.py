"""What a strategy's arguments have to be.

The one idea: what is wrong is said where the strategy is made, before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_parallel.pipeline import schedules
from lightning_parallel.pipeline.schedule import Schedule


def refuse_arguments(strategy: object, **arguments: tuple[Any, bool, str]) -> None:
    """Raise for the first argument that is not right: {name: (what is, whether it is right, what was needed)}."""
    for name, (value, right, needed) in arguments.items():
        if not right:
            raise ValueError(f"{type(strategy).__name__}({name}={value!r}): {name} is {needed}.")


def refuse_lazy(model: nn.Module, name: str) -> None:
    """Raise for a model whose parameters have no shapes yet."""
    for lazy, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"{name} deals parameters by their sizes, and `{lazy}` has none before the first forward (a lazy"
                " module). Call the model once in its __init__, or give the sizes."
            )


def is_count(value: Any, least: int) -> bool:
    """Whether a value is a whole number, no bool, of `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def are_counts(values: Sequence[Any], least: int) -> bool:
    """Whether values are whole numbers of `least` or more, and at least one."""
    return len(values) > 0 and all(is_count(value, least) for value in values)


def is_positive(value: Any) -> bool:
    """Whether a value is a number, no bool, above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def all_are(values: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether values are a sequence, no string and not empty, of one kind, or of several kinds."""
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str)
        and bool(values)
        and all(isinstance(value, kind) for value in values)
    )


def read_schedule(schedule: str | Path | Schedule, num_microbatches: int | None) -> str | Schedule:
    """A schedule as `PipelineStrategy` takes it: its name, which is known, or the schedule itself, which is checked.

    Raises:
        ValueError: there is none of that name, or no such file, it cannot run, or it is for another number of
            micro-batches.
    """
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        if schedule.strip().lower() == "auto":
            return "auto"
        schedules.find(schedule)  # raises for an unknown name, here where the user can see it
        return schedule
    if not isinstance(schedule, Schedule) and not Path(schedule).is_file():
        raise ValueError(
            f"schedule={str(schedule)!r}: there is no such file in {Path.cwd()}. Give the path of a CSV file."
        )
    read = schedule if isinstance(schedule, Schedule) else Schedule.from_csv(schedule)
    read.check(receive_ahead=max(map(len, read.actions), default=0))  # the engine never waits in a send
    if num_microbatches not in (None, read.num_microbatches):
        raise ValueError(
            f"PipelineStrategy(num_microbatches={num_microbatches}) got schedule {read.name!r}, which is for"
            f" {read.num_microbatches} micro-batches. Leave num_microbatches out, or give a schedule by name."
        )
    return read
