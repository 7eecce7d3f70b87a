"""``lightning-parallel schedule``: look at a pipeline schedule before anything runs.

Prints the actions as a time grid, as in the papers, with bubbles and peak memory; writes a picture, a CSV or JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from lightning_parallel.measure.spans import Span
from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.planning.choice import choose
from lightning_parallel.pipeline.schedule import Schedule, receive_ahead_needed
from lightning_parallel.pipeline.schedules import SCHEDULES, find, make, spec
from lightning_parallel.pipeline.schedules.formulas import bubble_formula, formula_text
from lightning_parallel.pipeline.simulator import Timeline, simulate

MAX_COLUMNS, LINE = 160, 120  # of the grid, and letters of a line: what is longer goes on below
UNIT_COSTS = (1.0, 1.0, 1.0, 0.0)


def main(argv: list[str]) -> int:
    """Run the command and return its exit code.

    Args:
        argv: the words after ``lightning-parallel schedule``.

    Example:
        >>> main("1f1b --ranks 2 --microbatches 2 --json".split())
        {"schedule": "1f1b", "ranks": 2, "stages": 2, "microbatches": 2, "makespan": 9.0, "idle": 0.33...
        0
    """
    arguments = _parser().parse_args(argv)
    try:
        schedule = _schedule(arguments)
        schedule.check(receive_ahead=max(map(len, schedule.actions)))
        timeline = simulate(schedule, _costs(arguments.costs))
        _write_files(arguments, timeline)
    except (ValueError, OSError) as error:
        print(f"lightning-parallel schedule: {error}", file=sys.stderr)
        return 2
    print(json.dumps(facts(timeline)) if arguments.json else report(timeline, arguments.costs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-parallel schedule", description=__doc__.splitlines()[0])
    names = ", ".join(_with_options(name) for name in SCHEDULES)
    parser.add_argument(
        "schedule",
        help=f"one of {names}; options as in interleaved_1f1b:v=3; auto, the fastest of them for --costs; or a CSV file"
        " with one row a rank",
    )
    parser.add_argument(
        "--ranks",
        "--stages",
        dest="ranks",
        type=int,
        help="D, how many ranks the pipeline has; the schedule says how many stages each of them holds",
    )
    parser.add_argument("--microbatches", type=int, help="M, how many micro-batches a step has")
    parser.add_argument(
        "--costs",
        type=_four_numbers,
        default=UNIT_COSTS,
        metavar="F,I,W,COMM",
        help="time of a forward, of an input gradient, of a weight gradient (B takes both), of a hop; default 1,1,1,0",
    )
    parser.add_argument("--png", metavar="PATH", help="write the timeline as a picture")
    parser.add_argument("--csv", metavar="PATH", help="write the actions as a CSV file, one row a rank")
    parser.add_argument("--json", action="store_true", help="print the numbers as one line of JSON, and nothing else")
    return parser


def _with_options(name: str) -> str:
    options = {key: value for key, value in spec.options_of(SCHEDULES[name]).items() if value is not None}
    return spec.write(name, options)


def _four_numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 4 or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not four numbers >= 0 apart by commas, such as 1,1,1,0 (F,I,W,comm)"
        )
    if not any(numbers[:3]):
        raise argparse.ArgumentTypeError(f"{text!r} gives no action any time; let F, I or W be above 0")
    return numbers


def _costs(numbers: Sequence[float]) -> Costs:
    forward, input_grad, weight_grad, communication = numbers
    return Costs(forward, input_grad, weight_grad, communication=communication)


def _schedule(arguments: argparse.Namespace) -> Schedule:
    name, ranks, microbatches = arguments.schedule, arguments.ranks, arguments.microbatches
    if not (name.lower().endswith(".csv") or Path(name).is_file()):
        if name.lower() != "auto":
            find(name)  # raises, with the names there are
        if ranks is None or microbatches is None:
            raise ValueError(f"The schedule {name} needs --ranks and --microbatches.")
        if name.lower() == "auto":
            return choose(ranks, microbatches, _costs(arguments.costs)).schedule
        return _make(name, ranks, microbatches, _costs(arguments.costs))
    schedule = Schedule.from_csv(name)
    for option, given, found in (
        ("--ranks", ranks, schedule.num_ranks),
        ("--microbatches", microbatches, schedule.num_microbatches),
    ):
        if given not in (None, found):
            raise ValueError(f"{name} has {found} {option[2:]}, not {option} {given}. Leave {option} out.")
    return schedule


def _make(name: str, ranks: int, microbatches: int, costs: Costs) -> Schedule:
    """A schedule that is made for times is made for those given."""
    takes_costs = "costs" in spec.options_of(find(name)[0])
    return make(name, ranks, microbatches, **({"costs": costs} if takes_costs else {}))


def _write_files(arguments: argparse.Namespace, timeline: Timeline) -> None:
    for path in (arguments.csv, arguments.png):
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"there is no folder {Path(path).parent} to write {Path(path).name} into; make it first.")
    if arguments.csv:
        timeline.schedule.to_csv(arguments.csv)
    if arguments.png:
        from lightning_parallel.measure.picture import Panel, draw_timelines

        note = f"bubble: idle {timeline.idle:.4f}, span {timeline.span:.4f}"
        draw_timelines(arguments.png, [Panel(_title(timeline.schedule), timeline.rows, note)], seconds=False)


def _title(schedule: Schedule) -> str:
    ranks = f"{schedule.num_stages} stages on {schedule.num_ranks} ranks"
    return f"{schedule.name}: {ranks}, {schedule.num_microbatches} micro-batches"


def facts(timeline: Timeline) -> dict[str, object]:
    """The numbers of ``--json``; ``peak`` has one entry a rank, in activations of one full stage."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "makespan": timeline.makespan,
        "idle": timeline.idle,
        "span": timeline.span,
        "peak": timeline.peak,
    }


def report(timeline: Timeline, costs: Sequence[float] = UNIT_COSTS) -> str:
    """What the command prints: the time grid, bubbles beside their formula, peak memory."""
    schedule = timeline.schedule
    forward, input_grad, weight_grad, hop = costs
    formula = bubble_formula(schedule.name, schedule.num_ranks, schedule.num_microbatches)
    beside = (
        ""
        if formula is None
        else f"   formula {formula_text(schedule.name)} = {formula:.4f}, with F = I = W and no communication"
    )
    peaks = ", ".join(f"rank {rank}: {peak:g}" for rank, peak in enumerate(timeline.peak))
    lines = [
        f"{_title(schedule)}; F={forward:g} I={input_grad:g} W={weight_grad:g} (B=I+W), a hop {hop:g}",
        "",
        *grid(timeline),
        "",
        f"makespan          {timeline.makespan:g}",
        f"bubble (idle)     {timeline.idle:.4f}{beside}",
        f"bubble (span)     {timeline.span:.4f}",
        f"peak activations  {peaks}   (of one full stage and one micro-batch)",
        f"receives ahead    {receive_ahead_needed(schedule)}   (posted early, so that no send blocks for ever)",
    ]
    return "\n".join(lines)


def grid(timeline: Timeline) -> list[str]:
    """Ranks as lines, time to the right: ``F0`` begins there, ``-`` goes on, ``.`` is idle. Long lines go on below.

    Example:
        >>> print("\\n".join(grid(simulate(make("gpipe", 2, 2)))))
        rank 0  F0 F1 .  .  .  B0----B1----
        rank 1  .  F0 F1 B0----B1----.  .
    """
    unit, exact = _unit(timeline)
    columns = _column(timeline.makespan, unit)
    labels = [[_label(timeline, span) for span in row] for row in timeline.rows]
    cell = 1 + max(len(label) for row in labels for label in row)
    margin = len(f"rank {len(timeline.rows) - 1}")
    ranks = []
    for row, names in zip(timeline.rows, labels, strict=True):
        cells = ["." + " " * (cell - 1)] * columns
        for span, label in zip(row, names, strict=True):
            first, end = _column(span.start, unit), _column(span.end, unit)
            text = label.ljust((end - first) * cell, "-") if end - first > 1 else label.ljust(cell)
            cells[first:end] = [text[at * cell : (at + 1) * cell] for at in range(end - first)]
        ranks.append(cells)
    blocks = math.ceil(columns / ((LINE - margin - 2) // cell))
    across = math.ceil(columns / blocks)
    lines: list[str] = []
    for start in range(0, columns, across):
        lines += ["", f"from {start * unit:g} on:"] if start else []
        lines += [
            f"rank {rank}".ljust(margin) + "  " + "".join(cells[start : start + across]).rstrip()
            for rank, cells in enumerate(ranks)
        ]
    return lines if exact else [*lines, f"(one column is {unit:g}; rounded to columns)"]


def _label(timeline: Timeline, span: Span) -> str:
    one_stage = len(timeline.schedule.placement) == timeline.schedule.num_ranks
    stage = "" if one_stage else str(span.stage)
    piece = "" if span.slice is None else f"s{span.slice}"
    return f"{stage}{span.kind}{span.microbatch}" + (f"r{span.replica}" if span.replica else "") + piece


def _column(time: float, unit: float) -> int:
    return math.floor(time / unit + 0.5)


def _unit(timeline: Timeline) -> tuple[float, bool]:
    """The time of one column, and whether every action fills whole columns with it."""
    times = {time for row in timeline.rows for span in row for time in (span.start, span.end) if time > 0}
    fractions = [Fraction(time).limit_denominator(1000) for time in times]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    unit = math.gcd(*(int(fraction * denominator) for fraction in fractions)) / denominator
    if unit > 0 and timeline.makespan / unit <= MAX_COLUMNS:
        return unit, True
    shortest = min(span.seconds for row in timeline.rows for span in row if span.seconds > 0)
    return max(shortest / 2, timeline.makespan / MAX_COLUMNS), False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
