"""The generators, over thousands of (D, M): names, options, refusals, and every check."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parallel.pipeline.schedule import receive_ahead_needed
from lightning_parallel.pipeline.schedules import SCHEDULES, make
from lightning_parallel.pipeline.schedules.spec import options_of
from lightning_parallel.pipeline.simulator import Costs, peak_activations, simulate

EVEN = {"dualpipe", "chimera"}  # on an even number of ranks only
WITH_OPTIONS = [
    "dapple:policy=2",
    "dapple:limit=2",
    "zb_auto:limit=1.5",
    "zb_auto:limit=3",
    "zb_v_auto:limit=16,weight_share=0.5",
    "terapipe:slices=1",
    "interleaved_1f1b:v=1",
    "interleaved_1f1b:v=3",
    "interleaved_zb:v=1",
    "interleaved_zb:v=3",
    "looped_bfs:v=3",
    "chimera:doubling=true",
]
ALL = [*SCHEDULES, *WITH_OPTIONS]


def ranks_of(name, largest):
    return range(2 if name.split(":")[0] in EVEN else 1, largest + 1, 2 if name.split(":")[0] in EVEN else 1)


@pytest.mark.parametrize("name", ALL)
def test_small_ones_pass_every_check(name):
    for num_ranks in ranks_of(name, 5):
        for num_microbatches in (*range(1, 9), 11, 12):
            schedule = make(name, num_ranks, num_microbatches)
            schedule.check(receive_ahead=max(map(len, schedule.actions)))
            assert schedule.num_ranks == num_ranks
            assert schedule.num_microbatches == num_microbatches


@given(st.sampled_from(ALL), st.integers(1, 16), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_large_ones_pass_every_check(name, num_ranks, num_microbatches):
    even = num_ranks + num_ranks % 2 if name.split(":")[0] in EVEN else num_ranks
    schedule = make(name, even, num_microbatches)
    schedule.check(receive_ahead=max(map(len, schedule.actions)))


# Of every schedule at D = 4, M = 16, and the same for all M >= 2D.
RECEIVES = {
    "naive": 0,
    "gpipe": 0,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "zb_h1": 1,
    "zb_h2": 2,
    "interleaved_zb": 7,
    "zb_v": 9,
    "zb_v_auto": 9,
    "chimera:doubling=true": 2,
    "dualpipe": 2,
    "dualpipe_v": 7,
}


@pytest.mark.parametrize("limit", [1, 1.5, 2, 3, 4.5, 7])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_automatic_ones_keep_their_limit(limit, share):
    for num_ranks in (1, 2, 4, 6):
        for num_microbatches in (1, 3, 8, 13):
            schedule = make("zb_auto", num_ranks, num_microbatches, limit=limit, weight_share=share)
            assert max(peak_activations(schedule, share)) <= limit + 1e-6


def test_automatic_ones_are_made_for_imbalanced_stages():
    """A slow stage in the middle: the order made for its times is no slower than the one for equal times."""
    costs = Costs([1.0, 1.0, 2.0, 1.0], [1.0, 1.0, 2.0, 1.0], [1.0, 1.0, 1.5, 1.0], communication=0.1)
    for name in ("zb_1p", "zb_2p"):
        fitted = simulate(make(name, 4, 12, costs=costs), costs)
        assert fitted.span <= simulate(make(name, 4, 12), costs).span + 1e-9
        assert fitted.span < simulate(make("zb_h1", 4, 12), costs).span


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_v_for_given_times_keeps_its_limit_and_is_no_slower_than_that_for_equal_times(share):
    costs = Costs([1.0] * 4 + [2.0] * 4, [1.5] * 8, [1.0] * 7 + [2.5], communication=0.2)
    for num_microbatches in (1, 3, 4, 8, 13):
        fitted = make("zb_v_auto", 4, num_microbatches, costs=costs, weight_share=share)
        assert max(peak_activations(fitted, share)) <= 4 + 1e-6
        plain = make("zb_v_auto", 4, num_microbatches, weight_share=share)
        assert simulate(fitted, costs).span <= simulate(plain, costs).span + 1e-9
        roomy = make("zb_v_auto", 4, num_microbatches, costs=costs, weight_share=share, limit=6)
        assert max(peak_activations(roomy, share)) <= 6 + 1e-6


@pytest.mark.parametrize("name", RECEIVES)
def test_receives_posted_ahead_do_not_grow_with_micro_batches(name):
    assert {receive_ahead_needed(make(name, 4, m)) for m in (8, 12, 16)} == {RECEIVES[name]}


@pytest.mark.parametrize("name", ALL)
def test_every_rank_has_the_same_work_and_no_micro_batch_waits_for_another_step(name):
    schedule = make(name, 4, 8)
    held = {rank: len(schedule.stages_of(rank)) for rank in range(4)}
    assert len(set(held.values())) == 1
    timeline = simulate(schedule)
    assert timeline.makespan >= max(sum(span.seconds for span in row) for row in timeline.rows)


@pytest.mark.parametrize("name", ALL)
def test_a_name_makes_the_schedule_again(name):
    schedule = make(name, 4, 8)
    assert make(schedule.name, 4, 8) == schedule


def test_one_rank_runs_whole_backwards_or_their_halves():
    for name in set(SCHEDULES) - EVEN:
        assert simulate(make(name, 1, 3)).idle == 0, name


def test_fewer_rows_leave_the_order_of_the_others():
    for name in ALL:
        schedule = make(name, 4, 12)
        fewer = schedule.first(11)
        fewer.check(receive_ahead=max(map(len, fewer.actions)))
        assert all(first.microbatch < 11 for first in fewer.paired)
    assert all(f.microbatch < 10 for f in make("chimera:doubling=true", 4, 12).first(11).paired)  # 10 lost its partner


def test_names_are_read_in_any_case():
    assert make("GPipe", 2, 2) == make("gpipe", 2, 2)
    assert make("ZB-H1", 2, 2) == make("zb_h1", 2, 2)


def test_options_are_words_or_keywords():
    assert make("interleaved_1f1b:v=3,group=5", 4, 9) == make("interleaved_1f1b", 4, 9, v=3, group=5)
    assert make("interleaved_1f1b", 2, 4, v=3).num_stages == 6
    assert options_of(SCHEDULES["interleaved_1f1b"]) == {"v": 2, "group": 0}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"No schedule is called 'zbx'\. There are: naive, gpipe, 1f1b, .*, or give a"):
        make("zbx", 2, 2)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "message"),
    [
        ("1f1b", 0, 1, r"Schedule '1f1b' got num_ranks=0\. Use 1 or more\."),
        ("1f1b", 2, 0, r"Schedule '1f1b' got num_microbatches=0\. Use 1 or more\."),
        ("1f1b:v=2", 2, 2, r"Schedule '1f1b:v=2' has no option 'v'\. Its options and their defaults: none\."),
        ("interleaved_1f1b:w=2", 2, 2, r"has no option 'w'\. Its options and their defaults: v=2, group=0\."),
        ("interleaved_1f1b:v", 2, 2, r"'v' is no option\. Write name:option=value"),
        ("interleaved_1f1b:v=x", 2, 2, r"'x' is no value for an option\. Use a number, true or false\."),
        ("looped_bfs:v=0", 2, 2, r"got v=0 stages a rank\. Use 1 or more\."),
        ("interleaved_1f1b:group=6", 4, 8, r"got group=6 for 8 micro-batches on 4 ranks, which leaves 2\. Groups"),
        ("interleaved_1f1b:group=3", 4, 12, r"got group=3 for 12 micro-batches on 4 ranks, which leaves 0\. Groups"),
        ("chimera", 3, 8, r"Schedule 'chimera' got 3 ranks\. Use an even number of ranks\."),
        ("chimera:pairs=3", 4, 8, r"Schedule 'chimera:pairs=3' got pairs=3 on 4 ranks\. Use a divisor of 2\."),
        ("chimera:pairs=2,doubling=true", 4, 8, r"got pairs=2 with doubling\. Their slots meet: use pairs=1\."),
        ("zb_auto:limit=0.5", 4, 8, r"got limit=0\.5\. A rank holds at least 1 micro-batch\."),
        ("zb_v_auto:limit=3", 4, 8, r"got limit=3\. A rank holds at least 4 here\."),
        ("zb_1p:weight_share=2", 4, 8, r"got weight_share=2\. It is above 0 and at most 1\."),
        ("dapple:policy=3", 4, 8, r"got policy=3\. Use 1 or 2\."),
        ("terapipe:slices=0", 4, 8, r"got slices=0\. Use 1 or more\."),
        ("dualpipe", 3, 8, r"Schedule 'dualpipe' got 3 ranks\. Use an even number of ranks, or dualpipe_v\."),
    ],
)
def test_what_cannot_be_is_told(name, ranks, microbatches, message):
    with pytest.raises(ValueError, match=message):
        make(name, ranks, microbatches)
