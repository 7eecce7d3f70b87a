"""Action and Schedule: the text and CSV forms, what can be said, and that it travels cheaply."""

import csv
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_parallel.pipeline import Action, Schedule
from lightning_parallel.pipeline.schedules import SCHEDULES, make

ACTIONS = st.builds(
    Action,
    kind=st.sampled_from("FBIWU"),
    stage=st.integers(0, 40),
    microbatch=st.integers(0, 999),
    replica=st.integers(0, 3),
    slice=st.none() | st.integers(0, 12),
    version=st.none() | st.integers(0, 12),
)


@given(ACTIONS)
def test_the_text_of_an_action_reads_back(action):
    assert Action.parse(str(action)) == action
    assert pickle.loads(pickle.dumps(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action("F", 2, 0)),
        ("1I3", Action("I", 1, 3)),
        ("10W12r1", Action("W", 10, 12, replica=1)),
        ("2F0s3v5", Action("F", 2, 0, slice=3, version=5)),
        ("0U1", Action("U", 0, 1)),
    ],
)
def test_text(text, action):
    assert str(action) == text
    assert Action.parse(f" {text} ") == action


@pytest.mark.parametrize("text", ["3SEND_F1", "2UNSHARD", "F0", "2X0", "2F", "", "2F0r"])
def test_what_is_no_computation_is_refused(text):
    with pytest.raises(ValueError, match=r"is not an action\. Write \[stage\]\[kind\]\[micro-batch\], such as 2F0"):
        Action.parse(text)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind is one of F, B, I, W, U, got 'X'"):
        Action("X", 0, 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_and_text_read_back(name, tmp_path):
    schedule = make(name, 4, 5)
    path = tmp_path / f"{name}.csv"
    schedule.to_csv(path)
    assert Schedule.from_csv(path) == schedule
    assert Schedule.from_text(schedule.to_text(), name=name) == schedule


def test_torch_reads_our_csv_and_runs_it_on_paper(tmp_path):
    make("1f1b", 4, 8).to_csv(tmp_path / "1f1b.csv")
    with open(tmp_path / "1f1b.csv", newline="") as file:
        order = {rank: list(map(torch_schedules._Action.from_str, row)) for rank, row in enumerate(csv.reader(file))}
    stages = torch_schedules._validate_schedule(order, 4, 4, 8)
    assert stages == {0: 0, 1: 1, 2: 2, 3: 3}
    lowered = torch_schedules._add_send_recv(order, stages.__getitem__, 4)
    torch_schedules._simulate_comms_compute(lowered, stages.__getitem__, 4)


def test_a_torch_csv_with_padding_and_pairs_reads(tmp_path):
    path = tmp_path / "torch.csv"
    path.write_text("0F0,0F1,,3F0,3B0,(0F2;3F1)OVERLAP_F_B\r\n,1F0,1F1,2F0\r\n\r\n")
    schedule = Schedule.from_csv(path)
    assert schedule.to_text() == "0F0 0F1 3F0 3B0 0F2&3F1\n1F0 1F1 2F0"
    assert schedule.actions[0][4:] == (Action("F", 0, 2), Action("F", 3, 1))
    assert schedule.paired == {Action("F", 0, 2)}
    assert schedule.placement == {(0, 0): 0, (0, 3): 0, (0, 1): 1, (0, 2): 1}
    assert (schedule.name, schedule.num_microbatches, schedule.num_stages) == ("torch", 3, 4)


def test_a_stage_on_two_rows_is_refused():
    with pytest.raises(ValueError, match="runs stage 0 of replica 0 on row 0 and, with 0F1, on row 1"):
        Schedule.from_text("0F0 / 0F1")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "none.csv").write_text("\n")
    with pytest.raises(ValueError, match="Schedule 'none' has no actions"):
        Schedule.from_csv(tmp_path / "none.csv")


def test_two_stages_a_rank_with_a_split_backward_check():
    rows = "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0B0 0B1 / 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    schedule = Schedule.from_text(rows)
    schedule.check()
    assert schedule.num_ranks == 2
    assert schedule.num_stages == 4
    assert schedule.stages_of(0) == ((0, 0), (0, 2))
    assert schedule.needs(Action("I", 2, 1)) == (Action("F", 2, 1), Action("B", 3, 1))
    assert schedule.needs(Action("B", 1, 1)) == (Action("F", 1, 1), Action("I", 2, 1))


def test_two_replicas_in_opposite_directions_check():
    schedule = Schedule.from_text("0F0 1F1r1 1B1r1 0B0 / 0F1r1 1F0 1B0 0B1r1")
    schedule.check()
    assert schedule.num_replicas == 2
    assert schedule.stages_of(1) == ((0, 1), (1, 0))


def test_slices_wait_for_the_keys_before_and_the_gradients_after():
    schedule = Schedule.from_text("0F0s0 0F0s1 0B0s1 0B0s0 / 1F0s0 1F0s1 1B0s1 1B0s0")
    schedule.check()
    assert schedule.needs(Action("F", 1, 0, slice=1)) == (Action("F", 0, 0, slice=1), Action("F", 1, 0, slice=0))
    assert schedule.needs(Action("B", 1, 0, slice=0)) == (Action("F", 1, 0, slice=0), Action("B", 1, 0, slice=1))


def test_versions_and_updates_are_labels_that_order_nothing():
    schedule = Schedule.from_text("0F0v0 0F1v0 0B0v0 0U0 0B1v0 0U1 / 1F0v0 1B0v0 1U0 1F1v1 1B1v1 1U1")
    schedule.check()
    assert schedule.needs(Action("B", 0, 1, version=0)) == (Action("F", 0, 1), Action("B", 1, 1))
    assert schedule.of("U", row=1) == (Action("U", 1, 0), Action("U", 1, 1))


def test_a_skip_edge_is_a_need_both_ways():
    schedule = Schedule.from_text("0F0 0B0 / 1F0 1B0 / 2F0 2B0", edges=((0, 1), (1, 2), (0, 2)))
    schedule.check()
    assert schedule.needs(Action("F", 2, 0)) == (Action("F", 0, 0), Action("F", 1, 0))
    assert schedule.needs(Action("B", 0, 0)) == (Action("F", 0, 0), Action("B", 1, 0), Action("B", 2, 0))


@pytest.mark.parametrize("name", SCHEDULES)
def test_evaluation_keeps_the_forwards_alone(name):
    evaluation = make(name, 4, 6).forward_only()
    evaluation.check()
    assert {action.kind for row in evaluation.actions for action in row} == {"F"}
    assert evaluation.actions == tuple(make(name, 4, 6).of("F", row=row) for row in range(4))
    assert evaluation.name == f"{name} (forward only)"


def test_a_schedule_pickles_small_and_without_what_it_cached():
    schedule = make("1f1b", 16, 64)
    before = pickle.dumps(schedule)
    schedule.check()
    assert pickle.dumps(schedule) == before
    assert len(before) < 40_000
    copy = pickle.loads(before)
    assert copy == schedule
    assert hash(copy) == hash(schedule)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_the_first_micro_batches_of_a_schedule_are_a_schedule(name):
    schedule = make(name, 4, 8)
    for count in range(1, 9):
        first = schedule.first(count)
        first.check()
        assert first.num_microbatches == count and len(first.of("F")) == 4 * count
    assert schedule.first(8) is schedule
    with pytest.raises(ValueError, match="has 8 micro-batches, not 9"):
        schedule.first(9)
