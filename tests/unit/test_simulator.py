"""The simulator on schedules small enough to do by hand."""

import pytest

from lightning_parallel.pipeline import Schedule
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.simulator import Costs, peak_activations, simulate


def times(timeline, row):
    return [(span.label, span.start, span.end) for span in timeline.spans[row]]


def test_by_hand_with_a_hop():
    timeline = simulate(make("1f1b", 2, 1), Costs(forward=2, input_grad=1, weight_grad=2, communication=0.5))
    assert times(timeline, 0) == [("0F0", 0, 2), ("0B0", 8, 11)]
    assert times(timeline, 1) == [("1F0", 2.5, 4.5), ("1B0", 4.5, 7.5)]
    assert timeline.makespan == 11
    assert timeline.idle == pytest.approx(1 - 10 / 22)
    assert timeline.span == pytest.approx(1 - 5 / 11)


def test_costs_of_one_stage_and_of_one_hop():
    costs = Costs(forward=[1, 5], backward=[2, 2], communication={(0, 1): 1})
    timeline = simulate(make("gpipe", 2, 2), costs)
    assert times(timeline, 1) == [("1F0", 2, 7), ("1F1", 7, 12), ("1B0", 12, 14), ("1B1", 14, 16)]
    assert times(timeline, 0)[2:] == [("0B0", 14, 16), ("0B1", 16, 18)]


def test_the_critical_path_is_gapless_without_hops():
    timeline = simulate(make("1f1b", 4, 8))
    assert list(map(str, timeline.critical_path[:5])) == ["0F0", "1F0", "2F0", "3F0", "3B0"]
    assert str(timeline.critical_path[-1]) == "0B7"
    assert sum({"F": 1, "B": 2}[action.kind] for action in timeline.critical_path) == timeline.makespan


def test_span_forgives_a_rank_that_starts_late_and_ends_late():
    timeline = simulate(Schedule.from_text("0F0 0F1 0F2 0F3 / 1F0 1F1 1F2 1F3"))
    assert timeline.span == 0
    assert timeline.idle == pytest.approx(0.2)


def test_a_stage_counts_its_share_of_a_full_one():
    two_stages_a_rank = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 / 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"
    assert peak_activations(Schedule.from_text(two_stages_a_rank)) == [2, 2]
    assert peak_activations(Schedule.from_text("0F0 1F0 2F0 2B0 1B0 0B0")) == [1]
    assert peak_activations(Schedule.from_text("0F0 1F0 1B0 0B0 / 2F0 2B0")) == [
        pytest.approx(4 / 3),
        pytest.approx(2 / 3),
    ]


def test_a_slice_counts_its_share_of_a_micro_batch():
    assert peak_activations(Schedule.from_text("0F0s0 0F0s1 0F0s2 0B0s2 0B0s1 0B0s0")) == [1]


def test_weight_gradients_hold_their_activations():
    assert peak_activations(Schedule.from_text("0F0 0I0 0F1 0I1 0W0 0W1")) == [2]
    assert peak_activations(Schedule.from_text("0F0 0I0 0W0 0F1 0I1 0W1")) == [1]


def test_updates_take_their_time_and_their_place():
    timeline = simulate(Schedule.from_text("0F0 0B0 0U0 0F1 0B1 0U1"), Costs(update=0.5))
    assert times(timeline, 0)[3] == ("0F1", 3.5, 4.5)


def test_a_stage_without_a_cost_is_told():
    with pytest.raises(ValueError, match="Costs are given for 2 stages, and the schedule has stage 2"):
        simulate(make("gpipe", 3, 1), Costs(forward=[1.0, 1.0]))


def test_an_order_that_cannot_run_is_told():
    with pytest.raises(ValueError, match="has actions before what they need: row 0 at 0B0"):
        simulate(Schedule.from_text("0B0 0F0"))
