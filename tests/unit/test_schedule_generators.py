"""The generators, over thousands of (D, M) and against torch's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_parallel.pipeline.schedules import SCHEDULES, make
from lightning_parallel.pipeline.schedules.formulas import peak_formula
from lightning_parallel.pipeline.simulator import peak_activations


@pytest.mark.parametrize("name", SCHEDULES)
def test_small_ones_pass_every_check(name):
    for num_stages in range(1, 7):
        for num_microbatches in range(1, 13):
            make(name, num_stages, num_microbatches).check(receive_ahead=1)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 24), st.integers(1, 48))
@settings(max_examples=60, deadline=None)
def test_large_ones_pass_every_check(name, num_stages, num_microbatches):
    make(name, num_stages, num_microbatches).check(receive_ahead=1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_hold_their_stage_and_the_activations_of_the_formula(name):
    for num_stages in range(1, 33):
        for num_microbatches in range(1, 33):
            schedule = make(name, num_stages, num_microbatches)
            assert schedule.placement == {(0, stage): stage for stage in range(num_stages)}
            assert all(len(row) == 2 * num_microbatches for row in schedule.actions)
            assert peak_activations(schedule) == peak_formula(name, num_stages, num_microbatches)


def torch_rows(cls, num_stages, num_microbatches):
    """Torch's own order: its schedule objects need a process group to be made, their generator does not."""
    schedule = cls.__new__(cls)
    schedule._num_stages, schedule._n_microbatches = num_stages, num_microbatches
    order = schedule._get_pipeline_order()
    compute = [[action for action in order[rank] if action and action.is_compute_op] for rank in range(num_stages)]
    return [" ".join(map(str, row)) for row in compute]


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_gpipe_is_torchs(num_stages):
    for num_microbatches in range(1, 17):
        ours = make("gpipe", num_stages, num_microbatches).to_text().splitlines()
        assert ours == torch_rows(torch_schedules.ScheduleGPipe, num_stages, num_microbatches)


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_1f1b_is_torchs(num_stages):
    for num_microbatches in range(num_stages, 17):  # torch needs M >= D
        ours = make("1f1b", num_stages, num_microbatches).to_text().splitlines()
        theirs = torch_rows(torch_schedules.Schedule1F1B, num_stages, num_microbatches)
        # Torch 2.13's list for the last rank counts its forwards from 1 instead of 0; its kinds are right.
        assert ours[:-1] == theirs[:-1]
        assert kinds(ours[-1]) == kinds(theirs[-1])


def kinds(row):
    return [letter for letter in row if letter in "FB"]


def test_names_are_read_in_any_case():
    assert make("GPipe", 2, 2) == make("gpipe", 2, 2)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"No schedule is called 'zbv'\. There are: naive, gpipe, 1f1b, or give a CSV"):
        make("zbv", 2, 2)


@pytest.mark.parametrize(("stages", "microbatches", "message"), [(0, 1, "num_stages=0"), (2, 0, "num_microbatches=0")])
def test_numbers_below_one_are_refused(stages, microbatches, message):
    with pytest.raises(ValueError, match=f"Schedule '1f1b' got {message}. Use 1 or more."):
        make("1f1b", stages, microbatches)
