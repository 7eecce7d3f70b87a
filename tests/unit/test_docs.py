"""The pages of schedules and features, and the pictures, are those that their scripts make now."""

import importlib.util
import json
from pathlib import Path

import pytest
from lightning.pytorch import callbacks

from lightning_parallel.measure.palette import ACTIONS
from lightning_parallel.pipeline.schedules import SCHEDULES
from tests.trainer.conformance import table
from tests.unit.test_pictures import channels, colours_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("draw_schedules", DOCS / "draw_schedules.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script):
    assert (DOCS / "schedules.md").read_text() == script.page(), "run python docs/draw_schedules.py"


def test_the_pictures_are_current(script):
    drawn = json.loads(script.DRAWN.read_text())
    assert drawn == {name: script.digest(name) for name in script.NAMES}, "run python docs/draw_schedules.py"
    for name in script.NAMES:
        picture, rows = script.IMAGES / f"{name}.png", script.pictured(name).rows
        two = any(len({(span.stage, span.replica) for span in row}) > 1 for row in rows)
        shades = {shade for row in rows for span in row for shade in ACTIONS[span.kind][: 1 + two]}
        assert {channels(shade) for shade in shades} <= colours_of(picture)
        assert picture.stat().st_size < 20_000


@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="Lightning averages weights from 2.6 on")
def test_the_table_of_features_is_current():
    """It says what the conformance suite says today; nothing is run for it."""
    assert table.PAGE.read_text() == table.page(), "run python -m tests.trainer.conformance.table"


def test_every_schedule_says_where_it_comes_from(script):
    for name in SCHEDULES:
        description, source = script._docstring(name)
        assert len(description) > 100, name
        assert source, name
