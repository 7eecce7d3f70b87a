"""Draw the pictures of ``docs/schedules.md``: ``python docs/draw_schedules.py``."""

from pathlib import Path

from lightning_parallel.measure.picture import Panel, draw_timelines
from lightning_parallel.pipeline.schedules import SCHEDULES, make
from lightning_parallel.pipeline.simulator import simulate

IMAGES = Path(__file__).parent / "images"
STAGES, MICROBATCHES = 4, {"naive": 2}

for name in SCHEDULES:
    timeline = simulate(make(name, STAGES, MICROBATCHES.get(name, 8)))
    peaks = ", ".join(f"{peak:g}" for peak in timeline.peak)
    note = f"bubble {timeline.idle:.4f}, activations held {peaks}"
    title = f"{name}: {STAGES} stages, {MICROBATCHES.get(name, 8)} micro-batches"
    draw_timelines(IMAGES / f"{name}.png", [Panel(title, timeline.rows, note)], seconds=False, dpi=100)
