"""Write ``docs/schedules.md`` and draw its pictures: ``python docs/draw_schedules.py``.

Rules and sources come from the generators' docstrings, numbers from the simulator; ``tests/unit/test_docs.py``
says when the page or a picture is older than they are. ``--text`` leaves the pictures alone.
"""

import hashlib
import inspect
import json
import re
import sys
from pathlib import Path

from lightning_parallel.measure import palette
from lightning_parallel.measure.picture import Panel, draw_timelines
from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.planning.choice import choose
from lightning_parallel.pipeline.planning.loads import costs_of_stages
from lightning_parallel.pipeline.planning.splits import merge_useless_splits
from lightning_parallel.pipeline.schedule import receive_ahead_needed
from lightning_parallel.pipeline.schedules import SCHEDULES, find, make, spec
from lightning_parallel.pipeline.schedules.formulas import bubble_formula, find_formula
from lightning_parallel.pipeline.simulator import Timeline, simulate

DOCS = Path(__file__).parent
IMAGES, DRAWN = DOCS / "images", DOCS / "images" / "drawn.json"
RANKS, MICROBATCHES = 4, {"naive": 2, "terapipe": 3}
SHOWN = {"zb_auto": "zb_auto:limit=6", "dapple": "dapple:policy=2", "chimera_doubling": "chimera:doubling=true"}
ALSO = {"chimera": "chimera_doubling"}  # a second row and picture in the section of the first
NAMES = [shown for name in SCHEDULES for shown in (name, ALSO.get(name)) if shown]
DPI = 90


def timeline(name: str, microbatches: int = 8) -> Timeline:
    """The schedule of a name, with equal times for a rank's whole share."""
    schedule = make(SHOWN.get(name, name), RANKS, microbatches)
    return simulate(schedule, costs_of_stages(Costs(1.0, 1.0, 1.0), RANKS, schedule.num_stages))


def pictured(name: str) -> Timeline:
    return timeline(name, MICROBATCHES.get(name, 8))


def digest(name: str) -> str:
    """Of all that a picture shows."""
    shown = pictured(name)
    return hashlib.sha256(f"{shown.schedule.to_text()} {shown.rows} {palette.version()}".encode()).hexdigest()[:16]


def panel(name: str) -> Panel:
    """What a picture shows."""
    shown = pictured(name)
    peaks = ", ".join(f"{peak:g}" for peak in shown.peak)
    note = f"idle {shown.idle:.4f}, span {shown.span:.4f}, activations held {peaks}"
    title = f"{shown.schedule.name}: {RANKS} ranks, {shown.schedule.num_microbatches} micro-batches"
    return Panel(title, shown.rows, note)


def draw(name: str) -> None:
    draw_timelines(IMAGES / f"{name}.png", [panel(name)], seconds=False, dpi=DPI)


def row(name: str) -> str:
    """A line of the table."""
    shown, schedule = timeline(name), timeline(name).schedule
    short = spec.parse(schedule.name)[0]
    formula = find_formula(schedule.name)
    text = "none" if formula is None else f"{formula.text}" + (f", {formula.condition}" if formula.condition else "")
    cells = (
        f"[`{schedule.name}`](#{short})",
        str(schedule.num_stages),
        f"{shown.idle:.4f}",
        f"{shown.span:.4f}",
        ", ".join(f"{peak:g}" for peak in shown.peak),
        str(schedule.num_replicas),
        str(receive_ahead_needed(schedule)),
        text,
    )
    return f"| {' | '.join(cells)} |"


def section(name: str) -> str:
    """Picture, rule, formulas beside the simulation, and source of one schedule."""
    description, source = _docstring(name)
    microbatches = MICROBATCHES.get(name, 8)
    pictures = [shown for shown in (name, ALSO.get(name)) if shown]
    parts = [
        f"## {name}",
        *(f"![{p}, {RANKS} ranks, {microbatches} micro-batches](images/{p}.png)" for p in pictures),
        f"**Rule.** {description}",
        f"**Options.** {_options(name)}",
        f"**Formula beside simulation.** {_beside(name)}",
        f"**Source.** {source}",
    ]
    return "\n\n".join(part for part in parts if not part.endswith("** "))


def _docstring(name: str) -> tuple[str, str]:
    text = (inspect.getdoc(find(name)[0]) or "").replace("``", "`")
    description = re.split(r"\n\n(?:Args|Returns|Raises):", text)[0]
    source = re.sub(r"\s+", " ", text.partition("Source:")[2]).strip()
    return description, source


def _options(name: str) -> str:
    options = {key: value for key, value in spec.options_of(SCHEDULES[name]).items() if value is not None}
    told = inspect.getdoc(find(name)[0]) or ""
    words = []
    for key, value in options.items():
        (meaning,) = re.findall(rf"^    {key}: ((?:.|\n)*?)(?=\n    \w+:|\n\n)", told, re.MULTILINE)
        shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
        words.append(f"`{key}={shown}`, " + re.sub(r"\s+", " ", meaning.replace("``", "`")))
    return " ".join(words)


def _beside(name: str) -> str:
    texts = [_formula_beside(shown) for shown in (name, ALSO.get(name)) if shown]
    return " ".join(texts)


def _formula_beside(name: str) -> str:
    shown = SHOWN.get(name, name)
    formula = find_formula(shown)
    if formula is None:
        cells = "; ".join(f"M = {m}: {timeline(name, m).idle:.4f}" for m in (8, 16, 32))
        return f"No closed form for the bubble; simulated idle share at D = 4: {cells}."
    cells = []
    for m in (4, 8, 16):
        promised = bubble_formula(shown, RANKS, m)
        beside = "none" if promised is None else f"{promised:.4f}"
        cells.append(f"M = {m}: {beside} / {timeline(name, m).idle:.4f}")
    when = f" for {formula.condition}" if formula.condition else ""
    which = f"`{shown}`: idle" if name in ALSO.values() else "Idle"
    return f"{which} share {formula.text}{when}; formula / simulated at D = 4: {'; '.join(cells)}."


def page() -> str:
    head = "| schedule | stages | idle | span | held on ranks 0 to 3 | weights | ahead | formula of idle |"
    table = "\n".join([head, "|---" * 8 + "|", *map(row, NAMES)])
    merged = merge_useless_splits(make("zb_v", 4, 16))
    return (
        (DOCS / "schedules_template.md")
        .read_text()
        .format(
            table=table,
            schedules="\n\n".join(map(section, SCHEDULES)),
            whole=len(merged.of("B")),
            reason=repr(choose(4, 16, Costs(1.0, 1.0, 1.0), memory_limit=3).reason),
        )
    )


def main(text_only: bool) -> None:
    (DOCS / "schedules.md").write_text(page())
    if not text_only:
        for name in NAMES:
            draw(name)
        DRAWN.write_text(json.dumps({name: digest(name) for name in NAMES}, indent=1) + "\n")


if __name__ == "__main__":
    main("--text" in sys.argv)
