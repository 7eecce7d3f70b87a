"""Our orders beside those of torch's generators, which nobody here wrote."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_parallel.pipeline import Schedule
from lightning_parallel.pipeline.schedules import make


def rows_of(order, num_ranks):
    """Torch's actions of computation as text, its pairs as ours are written."""
    rows = []
    for rank in range(num_ranks):
        actions = [action for action in order(rank) if action is not None]
        rows.append(" ".join("&".join(map(str, action.sub_actions or [action])) for action in actions))
    return rows


def torch_rows(cls, num_stages, num_microbatches):
    """Of a schedule with one stage a rank. Torch's objects need a process group to be made, their generators do not."""
    schedule = cls.__new__(cls)
    schedule._num_stages, schedule._n_microbatches = num_stages, num_microbatches
    order = schedule._get_pipeline_order()
    return rows_of(lambda rank: [a for a in order[rank] if a and a.is_compute_op], num_stages)


def torch_rows_of_many(name, num_ranks, num_microbatches, v=2):
    """Of a schedule with several stages a rank."""
    cls = torch_schedules.get_schedule_class(name)
    schedule = cls.__new__(cls)
    schedule._stages = [SimpleNamespace() for _ in range(v)]
    schedule.n_local_stages, schedule.pp_group_size, schedule._n_microbatches = v, num_ranks, num_microbatches
    schedule._num_stages = schedule.num_stages = v * num_ranks
    schedule.number_of_rounds = max(1, num_microbatches // num_ranks)
    schedule.microbatches_per_round = num_microbatches // schedule.number_of_rounds
    return rows_of(schedule._calculate_single_rank_operations, num_ranks)


def ours(name, *numbers, **options):
    return make(name, *numbers, **options).to_text().splitlines()


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_gpipe_is_torchs(num_ranks):
    for m in range(1, 17):
        assert ours("gpipe", num_ranks, m) == torch_rows(torch_schedules.ScheduleGPipe, num_ranks, m)


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_1f1b_is_torchs(num_ranks):
    for m in range(num_ranks, 17):  # torch needs M >= D
        rows, theirs = ours("1f1b", num_ranks, m), torch_rows(torch_schedules.Schedule1F1B, num_ranks, m)
        # Torch 2.13's list for the last rank counts its forwards from 1 instead of 0; its kinds are right.
        assert rows[:-1] == theirs[:-1]
        assert kinds(rows[-1]) == kinds(theirs[-1])


def kinds(row):
    return [letter for letter in row if letter in "FB"]


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaved_ones_are_torchs(num_ranks, v):
    for m in range(1, 25):
        if m % max(1, m // num_ranks) == 0:  # torch's constraint
            assert ours("interleaved_1f1b", num_ranks, m, v=v) == torch_rows_of_many("Interleaved1F1B", num_ranks, m, v)
            theirs = torch_rows_of_many("InterleavedZeroBubble", num_ranks, m, v)
            assert ours("interleaved_zb", num_ranks, m, v=v) == theirs
        assert ours("looped_bfs", num_ranks, m, v=v) == torch_rows_of_many("LoopedBFS", num_ranks, m, v)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_schedules_in_a_v_are_torchs(num_ranks):
    for m in range(1, 33):
        assert ours("zb_v", num_ranks, m) == torch_rows_of_many("ZBVZeroBubble", num_ranks, m)
    for m in range(2 * num_ranks, 33):  # torch needs M >= 2D
        assert ours("dualpipe_v", num_ranks, m) == torch_rows_of_many("DualPipeV", num_ranks, m)


def zbpp_light(num_stages, num_microbatches):
    """The rule of zbpp-light 0.0.1's ``auto_schedule`` (MIT): W follows the I's from the stage-th on, then the rest.

    Its own loops, so that a mistake of ours is not repeated; the package itself wants Megatron.
    """
    rows = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage - 1, num_microbatches)
        letters = "F" * warmup
        for at in range(num_microbatches - warmup):
            letters += "FI" + "W" * (at >= stage)
        for at in range(warmup):
            letters += "I" + "W" * (num_microbatches - warmup + at >= stage)
        letters += "W" * (num_microbatches - letters.count("W"))
        rows.append(" ".join(f"{stage}{k}{letters[:at].count(k)}" for at, k in enumerate(letters)))
    return rows


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_zb_h1_is_zbpp_lights_and_interleaved_zb_with_one_stage(num_stages):
    for m in range(num_stages, 25):
        rows = make("zb_h1", num_stages, m).actions
        assert rows == Schedule.from_text("\n".join(zbpp_light(num_stages, m))).actions
        assert rows == make("interleaved_zb", num_stages, m, v=1).actions
