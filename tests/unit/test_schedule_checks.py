"""Every way a schedule can be wrong, and the words that say so."""

from dataclasses import replace

import pytest

from lightning_parallel.pipeline import Action, Schedule
from lightning_parallel.pipeline.schedule import check_fifo, receive_ahead_needed
from lightning_parallel.pipeline.schedules import make

WRONG = {
    "backward before its forward": (
        "0F0 0B0 / 1B0 1F0",
        r"row 1 at 1B0 \(action 0\) waits for 1F0 \(row 1\)",
    ),
    "backward before the next stage's": (
        "0F0 0B0 0F1 0B1 / 1F0 1F1 1B0 1B1",
        r"row 0 at 0B0 \(action 1\) waits for 1B0 \(row 1\); row 1 at 1F1 \(action 1\) waits for 0F1 \(row 0\)\. Move",
    ),
    "weight gradient before the input gradient": (
        "0F0 0W0 0I0",
        r"row 0 at 0W0 \(action 1\) waits for 0I0 \(row 0\)",
    ),
    "a forward left out": ("0F0 0F1 0B0 0B1 / 1F0 1B0", "lacks the forward on stage 1 of replica 0 of micro-batch 1"),
    "a backward left out": ("0F0 0B0 / 1F0", r"lacks the backward \(B or I\) on stage 1 of replica 0 of micro-batch 0"),
    "a weight gradient left out": ("0F0 0I0", r"lacks the weight gradient \(W\) on stage 0 .* of micro-batch 0"),
    "a weight gradient of a whole backward": ("0F0 0B0 0W0", r"has no use for the weight gradient \(W\) on stage 0"),
    "a backward twice over": (
        "0F0 0B0 0I0 0W0",
        "runs B and I of micro-batch 0 on stage 0: a backward is either whole",
    ),
    "an action twice": ("0F0 0F0 0B0", "runs 0F0 2 times, not once"),
    "a micro-batch skipped": ("0F0 0F2 0B0 0B2", r"num_microbatches=3, so micro-batches 0 to 2, but runs \[0, 2\]"),
    "a micro-batch on two replicas": ("0F0 0B0 / 0F0r1 0B0r1", r"runs micro-batch 0 on replicas \[0, 1\]"),
    "a slice skipped": ("0F0s0 0F0s2 0B0s2 0B0s0", r"cuts micro-batch 0 into slices \[0, 2\]"),
    "two orders on one row, forwards": (
        "0F0 0F1 1F1 1F0 1B1 1B0 0B1 0B0",
        r"stage 1 \(row 0\) runs the forward of micro-batch 1 where stage 0 runs that of micro-batch 0\. Values",
    ),
    "two orders on one row, backwards": (
        "0F0 0F1 1F0 1F1 1B1 1B0 0B0 0B1",
        r"stage 1 \(row 0\) runs the backward of micro-batch 1 where stage 0 runs that of micro-batch 0\. Values",
    ),
    "a stage skipped": ("0F0 0B0 / 2F0 2B0", r"places no row for \(replica, stage\) \(0, 1\) of 3 stages"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_order_is_told(case):
    text, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        Schedule.from_text(text).check()


def test_an_action_on_the_row_of_another_stage_is_told():
    schedule = make("gpipe", 2, 2)
    swapped = replace(schedule, actions=schedule.actions[::-1])
    with pytest.raises(ValueError, match="1F0 is action 0 of row 0, its stage lies on row 1"):
        swapped.check()


def test_a_placement_on_no_row_is_told():
    with pytest.raises(ValueError, match="places stage 0 of replica 0 on row 3, but has rows 0 to 0"):
        Schedule("mine", ((Action("F", 0, 0),),), {(0, 0): 3}, 1).check()


def test_an_edge_backwards_is_told():
    with pytest.raises(ValueError, match=r"has the edge \(1, 0\)\. Values go from a stage to a later one"):
        Schedule.from_text("0F0 0B0 / 1F0 1B0", edges=((1, 0),)).check()


def test_a_number_of_microbatches_that_is_not_run_is_told():
    with pytest.raises(ValueError, match=r"num_microbatches=4, so micro-batches 0 to 3, but runs \[0, 1, 2\] forward"):
        replace(make("1f1b", 2, 3), num_microbatches=4).check()


def test_values_that_pass_each_other_on_a_channel_are_told():
    schedule = Schedule.from_text("0F0 0F1 0B1 0B0 / 1F1 1F0 1B1 1B0")
    message = (
        r"row 0 sends the result of 0F0 to row 1 \(forward\), which uses the result of 0F1 first\. "
        r"Values of one channel arrive in the order they were sent"
    )
    with pytest.raises(ValueError, match=message):
        schedule.check()


def test_gradients_have_a_channel_of_their_own():
    # Forwards in order, backwards in reverse on both rows, as in the GPipe paper.
    check_fifo(Schedule.from_text("0F0 0F1 0B1 0B0 / 1F0 1F1 1B1 1B0"))


def test_two_stages_of_a_row_share_the_channel_to_another_row():
    rows = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 / 1F0 3F0 1F1 3F1 3B0 3B1 1B0 1B1"
    with pytest.raises(
        ValueError, match=r"row 0 sends the result of 0F1 to row 1 \(forward\), which uses .* 2F0 first"
    ):
        check_fifo(Schedule.from_text(rows))


@pytest.mark.parametrize(("name", "needed"), [("naive", 0), ("gpipe", 0), ("1f1b", 1)])
def test_receives_posted_ahead(name, needed):
    schedule = make(name, 4, 8)
    assert receive_ahead_needed(schedule) == needed
    schedule.check(receive_ahead=needed)


def test_1f1b_stops_when_both_neighbours_send_first():
    message = (
        r"stops under rendezvous sends with receive_ahead=0: row 0 sends the result of 0F1 to row 1; "
        r"row 1 sends the result of 1B0 to row 0\. Post more receives ahead, or reorder the rows\."
    )
    with pytest.raises(ValueError, match=message):
        make("1f1b", 2, 4).check(receive_ahead=0)
