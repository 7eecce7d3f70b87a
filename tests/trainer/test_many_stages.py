"""Ranks that hold several stages: handed over without a message on one rank, and the same training as one process."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_parallel.demo import GPT
from lightning_parallel.pipeline.partition.layout import StageLayout, lay_out
from lightning_parallel.pipeline.runtime import assembly
from lightning_parallel.pipeline.schedule import Action, Schedule
from lightning_parallel.pipeline.schedules import SCHEDULES
from tests.trainer.modules import token_loader
from tests.trainer.pipelines import Case, assert_same, failure_of, many_on_stages, on_stages, one_process
from tests.trainer.test_parity import KEY_BIAS, gpt, hugging_face


def in_turn(placement: list[list[int]], num_microbatches: int, split: bool = False) -> Schedule:
    """Every rank forwards all micro-batches on its first stage, then on the next; backwards the other way round."""
    microbatches = range(num_microbatches)
    rows = []
    for stages in placement:
        row = [Action("F", stage, m) for stage in stages for m in microbatches]
        for stage in reversed(stages):
            row += [Action("I" if split else "B", stage, m) for m in microbatches]
        row += [Action("W", stage, m) for stage in stages for m in microbatches if split]
        rows.append(tuple(row))
    held = {(0, stage): row for row, stages in enumerate(placement) for stage in stages}
    return Schedule("in turn", tuple(rows), held, num_microbatches)


LOOP, SHAPE_OF_V, ALONE = [[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0, 1, 2]]


@pytest.mark.parametrize(
    "placement",
    [pytest.param(LOOP, marks=pytest.mark.slow), SHAPE_OF_V, pytest.param(ALONE, marks=pytest.mark.slow)],
    ids=["loop", "v", "one rank"],
)
def test_parity_of_whole_and_of_split_backwards(placement: list[list[int]]):
    cases = [
        Case(
            make, token_loader, {"schedule": in_turn(placement, 4, split)}, {"gradient_clip_val": 0.5, "max_epochs": 2}
        )
        for make in (gpt, lambda: hugging_face("llama"))
        for split in (False, True)
    ]
    for case, records in zip(cases, many_on_stages(cases, len(placement)), strict=True):
        assert_same(records, one_process(case), leave_out=KEY_BIAS)


NAMED = (
    "dapple:policy=2", "interleaved_1f1b", "interleaved_1f1b:v=3", "looped_bfs", "zb_h1", "zb_h2", "zb_1p", "zb_2p",
    "zb_auto:limit=1.5", "interleaved_zb", "zb_v", "zb_v_auto", "v_half", "v_min", "dualpipe_v",
)  # fmt: skip


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        pytest.param(2, NAMED, marks=pytest.mark.slow, id="2"),
        pytest.param(4, ("interleaved_1f1b:v=3", "zb_1p", "zb_v"), id="4"),
        pytest.param(4, ("v_half", "v_min", "dualpipe_v"), marks=pytest.mark.slow, id="4, other Vs"),
    ],
)
def test_parity_of_named_schedules(num_ranks: int, names: tuple[str, ...]):
    """Batches of 8 and of 3 rows: full ones, and one that is too short for some schedules' rules."""
    make = lambda: gpt(num_blocks=12)  # noqa: E731
    loader = lambda: token_loader(((8, 8), (8, 8), (3, 8)))  # noqa: E731
    case = Case(make, loader, {"num_microbatches": 8}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2})
    reference = one_process(case)
    cases = [case.but({"schedule": name}) for name in names]
    for _name, records in zip(names, many_on_stages(cases, num_ranks, timeout=100.0), strict=True):
        assert_same(records, reference, leave_out=KEY_BIAS)


class WithExample(GPT):
    """Says what a micro-batch looks like."""

    def __init__(self) -> None:
        super().__init__(vocabulary=11, context=16, width=16, num_heads=2, num_blocks=4)
        self.example_input_array = torch.zeros(2, 8, dtype=torch.int64)


def chosen(trainer: Trainer, module: LightningModule) -> Schedule:
    return trainer.strategy.schedule


def test_auto_chooses_one_schedule_on_all_ranks_and_trains_as_ever():
    case = Case(WithExample, token_loader, {"schedule": "auto", "num_microbatches": 4}, at_end=chosen)
    tight = case.but({"memory_limit": 1.0})
    records = on_stages(case, 2)
    assert records[0].extra == records[1].extra
    assert records[0].extra.name.partition(":")[0] in SCHEDULES
    assert_same(records, one_process(case.but(at_end=None)), leave_out=KEY_BIAS)
    assert "No schedule for 2 ranks and 4 micro-batches fits memory_limit=" in failure_of(tight)
    without = failure_of(Case(gpt, token_loader, {"schedule": "auto"}))
    assert 'schedule="auto" runs GPT.forward once on shapes alone and needs its example_input_array.' in without


def cut_by(trainer: Trainer, module: LightningModule) -> tuple[StageLayout, StageLayout]:
    """How the model was cut, and how the times of its units that a schedule was chosen by cut it."""
    pipeline, seconds = trainer.strategy.pipeline, trainer.strategy._seconds
    return pipeline.cut.layout, lay_out(module, pipeline.num_stages, partition="time", seconds=seconds)


def test_units_are_timed_once_to_choose_a_schedule_and_to_cut(monkeypatch):
    def again(*args: Any) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr(assembly, "unit_costs", again)
    options = {"schedule": "auto", "partition": "time", "num_microbatches": 4}
    case = Case(WithExample, token_loader, options, at_end=cut_by)
    for record in on_stages(case, 2):
        found, expected = record.extra
        assert found == expected
