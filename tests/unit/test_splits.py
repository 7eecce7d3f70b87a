"""Splits that gain nothing are merged, and no action starts later for it."""

import pytest

from lightning_parallel.pipeline import Schedule
from lightning_parallel.pipeline.planning.splits import merge_useless_splits
from lightning_parallel.pipeline.schedules import SCHEDULES, make
from lightning_parallel.pipeline.simulator import Costs, simulate


def merged(text, costs=None):
    return merge_useless_splits(Schedule.from_text(text), costs).to_text().splitlines()


def test_the_first_stage_has_nobody_that_waits():
    assert merged("0F0 0I0 0W0 0F1 0I1 0W1") == ["0F0 0B0 0F1 0B1"]


def test_a_weight_gradient_that_was_put_off_stays():
    assert merged("0F0 0F1 0I0 0I1 0W0 0W1") == ["0F0 0F1 0I0 0I1 0W0 0W1"]


def test_who_waits_in_between_keeps_the_split():
    rows = "0F0 0B0 / 1F0 1I0 1W0"
    assert merged(rows) == ["0F0 0B0", "1F0 1I0 1W0"]  # 0B0 starts when 1I0 ends


def test_who_is_busy_until_the_weight_gradient_is_done_does_not_wait():
    rows = "0F0 0F1 0F2 0B0 0B1 0B2 / 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1B2"
    # 1I0 ends at 3 and 1W0 at 4; row 0 forwards until 3 by unit costs, until 6 when a forward of stage 0 takes 2.
    assert merged(rows)[1].startswith("1F0 1I0 1W0")
    slow = Costs(forward=[2.0, 1.0])
    assert merged(rows, slow)[1].startswith("1F0 1B0 1F1")


def test_a_transfer_in_between_counts():
    rows = "0F0 0F1 0F2 0B0 0B1 0B2 / 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1B2"
    far = Costs(forward=[2.0, 1.0], communication={(1, 0): 2.0})
    assert merged(rows, far)[1].startswith("1F0 1I0 1W0")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("costs", [Costs(), Costs(2.0, 1.5, 0.5, communication=0.25), Costs(1.0, 1.0, 1.0, 1.75)])
def test_every_schedule_gets_no_slower_and_holds_no_more(name, costs):
    for num_ranks, num_microbatches in ((4, 8), (2, 5), (4, 3)):
        schedule = make(name, num_ranks, num_microbatches)
        merged = merge_useless_splits(schedule, costs)
        merged.check(receive_ahead=max(map(len, schedule.actions)))
        before, after = simulate(schedule, costs), simulate(merged, costs)
        assert after.makespan <= before.makespan + 1e-9
        assert all(one <= other for one, other in zip(after.peak, before.peak, strict=True))
        assert merge_useless_splits(merged, costs).of("F") == schedule.of("F")


def test_zb_v_splits_only_in_its_drain():
    """At equal times nobody waits for an I of the steady state, where F, I and W of two stages alternate."""
    schedule = merge_useless_splits(make("zb_v", 4, 16))
    split = {rank: len(schedule.of("I", row=rank)) for rank in range(4)}
    whole = {rank: len(schedule.of("B", row=rank)) for rank in range(4)}
    assert simulate(schedule).makespan == simulate(make("zb_v", 4, 16)).makespan
    assert all(split[rank] + whole[rank] == 32 for rank in range(4))
    assert sum(whole.values()) > 0
