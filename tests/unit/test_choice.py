"""Which schedule is chosen for given times and memory, and with which words."""

import pytest

from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.planning.choice import CANDIDATES, choose
from lightning_parallel.pipeline.planning.loads import costs_of_stages
from lightning_parallel.pipeline.schedules import SCHEDULES, make
from lightning_parallel.pipeline.schedules.spec import parse
from lightning_parallel.pipeline.simulator import peak_activations, simulate

EQUAL = Costs(1.0, 1.0, 1.0)


def test_every_schedule_is_a_candidate_but_the_one_that_cuts_sequences():
    assert {parse(name)[0] for name in CANDIDATES} == set(SCHEDULES) - {"terapipe"}


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, None])
def test_no_schedule_that_fits_is_faster(limit):
    choice = choose(4, 12, EQUAL, memory_limit=limit)
    step = simulate(choice.schedule, costs_of_stages(EQUAL, 4, choice.schedule.num_stages)).makespan
    assert limit is None or max(peak_activations(choice.schedule)) <= limit
    for name in CANDIDATES:
        schedule = make(name, 4, 12)
        fits = limit is None or max(peak_activations(schedule)) <= limit
        if fits and schedule.num_replicas == 1:
            times = costs_of_stages(EQUAL, 4, schedule.num_stages)
            assert step <= simulate(schedule, times).makespan + 1e-6, name


def test_less_memory_takes_a_longer_step():
    steps = [choose(4, 16, EQUAL, memory_limit=limit).candidates[0].timeline.makespan for limit in (2, 3, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert [choose(4, 16, EQUAL, memory_limit=limit).schedule.name for limit in (2, 3, 4)] == [
        "v_min",
        "v_half",
        "zb_v",
    ]


def test_a_split_that_costs_more_than_it_gains_is_not_chosen():
    """With I + W half as dear again as B, and every hop slow, a schedule of whole backwards wins."""
    choice = choose(4, 16, Costs(1.0, 1.5, 1.5, backward=2.0, communication=0.1), memory_limit=8)
    assert not choice.schedule.of("I")
    assert choice.schedule.name.startswith("interleaved_1f1b")


def test_replicas_need_the_size_of_the_weights():
    assert choose(4, 16, EQUAL).schedule.num_replicas == 1
    told = {option.name: option.excuse for option in choose(4, 16, EQUAL).candidates}
    assert told["chimera:pairs=2"] == "holds 4 copies of the weights, and their size is not given"
    assert told["chimera:doubling=true"] == "holds 2 copies of the weights, and their size is not given"
    assert choose(4, 16, EQUAL, weights=0.1).schedule.name == "chimera:pairs=2"
    tight = choose(4, 16, EQUAL, memory_limit=6, weights=1.5)  # 4 + 4 x 1.5 do not fit
    assert tight.schedule.num_replicas == 1


def test_the_reason_says_what_it_beats_and_what_does_not_fit():
    reason = choose(4, 16, EQUAL, memory_limit=3).reason
    assert reason == (
        "v_half: step 50.5, idle 0.0495, holds 3 of 3; 1f1b takes 57, 1.13 times as long and needs 4; "
        "chimera:pairs=2 would take 48 but holds 4 copies of the weights, and their size is not given"
    )


def test_what_cannot_be_made_says_why():
    told = {option.name: option.excuse for option in choose(3, 6, EQUAL, weights=0.0).candidates}
    assert (
        told["dualpipe"]
        == "cannot be made: Schedule 'dualpipe' got 3 ranks. Use an even number of ranks, or dualpipe_v."
    )


def test_nothing_that_fits_is_told():
    with pytest.raises(ValueError, match=r"fits memory_limit=0.5: .* needs 1; .* Use smaller micro-batches, recomput"):
        choose(4, 8, EQUAL, memory_limit=0.5)


def test_imbalanced_stages_are_cut_for_schedules_with_several_a_rank():
    costs = costs_of_stages(Costs([1.0, 3.0], [2.0, 2.0], 4.0, communication=0.5), 2, 4)
    assert costs.forward == [0.5, 0.5, 1.5, 1.5]
    assert costs.input_grad == [1.0, 1.0, 1.0, 1.0]
    assert (costs.weight_grad, costs.communication, costs.backward) == (2.0, 0.5, None)
    uneven = costs_of_stages(Costs([1.0, 2.0, 3.0]), 3, 2).forward
    assert uneven == pytest.approx([2.0, 4.0])


def test_a_heavy_piece_of_the_model_is_spread_by_several_stages_a_rank():
    heavy = Costs([1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 2.0])
    choice = choose(4, 8, heavy, memory_limit=8)
    step = choice.candidates[0].timeline.makespan
    assert 8 * 15 / 4 <= step < 8 * 6  # no less than all work over 4 ranks, less than the heavy piece on one of them
    assert choice.schedule.num_stages > 4
    assert step < simulate(make("1f1b", 4, 8), heavy).makespan
