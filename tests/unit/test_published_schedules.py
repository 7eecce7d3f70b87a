"""Tables of the papers on schedules with several stages a rank, two directions or split backwards."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.schedules.formulas import TABLE, bubble_formula, peak_formula
from lightning_parallel.pipeline.simulator import Costs, peak_activations, simulate

PUBLISHED = Path(__file__).parents[1] / "published"


def table(name):
    with open(PUBLISHED / name, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def cell(rows, key, column):
    """A formula of a table, as a function of its letters; multiplication signs that print leaves out are put in."""
    (row,) = [row for row in rows if key in row.values()]
    return lambda **letters: eval(row[column], {"__builtins__": {}}, letters)


# Idle bubbles at D = 4, T_F = T_I = T_W = 1, no communication, from an independent simulator; None: M micro-batches.
@pytest.mark.parametrize(
    ("name", "bubbles", "peak"),
    [
        ("gpipe", (0.4286, 0.2727, 0.2000, 0.1579), None),
        ("1f1b", (0.4286, 0.2727, 0.2000, 0.1579), [4, 3, 2, 1]),
        ("interleaved_1f1b", (0.2727, 0.1579, 0.1111, 0.0857), [5.5, 4.5, 3.5, 2.5]),
        ("looped_bfs", (0.2727, 0.1579, 0.1111, 0.0857), None),
        ("zb_h1", (0.2000, 0.1111, 0.0769, 0.0588), [4, 4, 4, 4]),
        ("zb_1p", (0.2000, 0.1111, 0.0769, 0.0588), [4, 4, 4, 4]),
        ("interleaved_zb:v=1", (0.2000, 0.1111, 0.0769, 0.0588), [4, 4, 4, 4]),
        ("zb_h2", (0.2500, 0.1111, 0.0769, 0.0588), [7, 7, 7, 7]),
        ("interleaved_zb", (0.1111, 0.0588, 0.0400, 0.0303), [4, 4, 4, 4]),
        ("zb_v", (0.2000, 0.0588, 0.0400, 0.0303), [4, 4, 4, 4]),
        ("zb_v_auto", (0.1111, 0.0588, 0.0400, 0.0303), [4, 4, 4, 4]),
        ("dualpipe_v", (None, 0.0588, 0.0400, 0.0303), [4.5, 4.5, 4.5, 4.5]),
        ("v_half", (0.2941, 0.0943, 0.0649, 0.0495), [3, 3, 3, 3]),
        ("v_min", (0.3143, 0.1864, 0.1325, 0.1028), [2, 2, 2, 2]),
    ],
)
def test_an_independent_simulator_agrees(name, bubbles, peak):
    for m, bubble in zip((4, 8, 12, 16), bubbles, strict=True):
        timeline = simulate(make(name, 4, m))
        if bubble is not None:
            assert round(timeline.idle, 4) == bubble
        if m >= 8:
            assert timeline.peak == (peak or [m] * 4)


def test_zero_bubble_by_span_is_zero_from_enough_micro_batches():
    for name in ("zb_h2", "zb_2p", "zb_v"):
        assert [round(simulate(make(name, 4, m)).span, 4) for m in (4, 8, 12)] == [0.2, 0, 0]


NAMES = [
    *TABLE,
    "interleaved_1f1b:v=1",
    "interleaved_1f1b:v=3",
    "looped_bfs:v=3",
    "interleaved_zb:v=3",
    "dapple:policy=2",
    "terapipe:slices=2",
]


@pytest.mark.parametrize("name", NAMES)
def test_formulas_are_what_is_simulated(name):
    compared = 0
    for d in range(1, 9):
        for m in (1, 2, 3, 4, 5, 7, 8, 12, 16, 20):
            if (d % 2 and name.startswith(("chimera", "dualpipe")) and name != "dualpipe_v") or bubble_formula(
                name, d, m
            ) is None:
                continue
            timeline = simulate(make(name, d, m))
            assert timeline.idle == pytest.approx(bubble_formula(name, d, m), abs=1e-12)
            assert timeline.peak == pytest.approx(peak_formula(name, d, m))
            if (span := bubble_formula(name, d, m, span=True)) is not None:
                assert timeline.span == pytest.approx(span, abs=1e-12)
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_megatrons_interleaving(v):
    """Bubble time (p-1)(t_f+t_b)/v, and (1/v)(p-1)/m of the ideal time, for p that divides m."""
    rows = table("megatron2021_bubble_formulas.csv")
    bubble_time = cell(rows, "interleaved bubble time", "formula")
    fraction = cell(rows, "interleaved bubble fraction", "formula")
    for p in range(1, 9):
        for m in (p, 2 * p, 5 * p):
            timeline = simulate(make("interleaved_1f1b", p, m, v=v), Costs(1 / v, 0.75 / v, 0.5 / v))
            assert timeline.makespan - m * 2.25 == pytest.approx(bubble_time(p=p, t_f=1, t_b=1.25, v=v))
            assert timeline.idle / (1 - timeline.idle) == pytest.approx(fraction(p=p, m=m, v=v))


@pytest.mark.parametrize("d", [2, 4, 6, 8, 12])
def test_chimera_table_2(d):
    ratio = cell(table("chimera_table2.csv"), "Chimera", "bubble_ratio")
    equal = Costs(1, 0.5, 0.5)  # the paper counts forward and backward slots equal
    for n in (d, 2 * d, 5 * d):
        timeline = simulate(make("chimera", d, n), equal)
        assert timeline.idle == pytest.approx(ratio(D=d, N=n))
        assert (min(timeline.peak), max(timeline.peak)) == (d / 2 + 1, d)  # [(D/2+1)*M_a, D*M_a]
    assert make("chimera", d, d).num_replicas == 2  # 2*M_theta


def test_chimera_by_the_independent_simulator():
    found = {
        d: [round(simulate(make("chimera", d, d), c).idle, 4) for c in (Costs(1, 0.5, 0.5), Costs())] for d in (4, 8)
    }
    assert found == {4: [0.2, 0.25], 8: [0.2727, 0.3333]}


@pytest.mark.parametrize(("d", "pairs"), [(4, 2), (8, 2), (8, 4), (12, 2), (12, 3)])
def test_chimera_of_several_pairs(d, pairs):
    """Each pair is a pipeline that waits as one of D / f stages does: (D/f - 2) / (2N + D/f - 2)."""
    for n in (d, 3 * d):
        timeline = simulate(make("chimera", d, n, pairs=pairs), Costs(1, 0.5, 0.5))
        assert timeline.idle == pytest.approx((d / pairs - 2) / (2 * n + d / pairs - 2))


@pytest.mark.parametrize("d", [2, 4, 6, 8, 12])
def test_chimera_with_forward_doubling(d):
    """At T_B = 2 T_F table 2's bubble, which is for T_B = T_F, at any number of units; twice the activations."""
    ratio = cell(table("chimera_table2.csv"), "Chimera", "bubble_ratio")
    for n in (2 * d, 4 * d, 10 * d):
        schedule = make("chimera", d, n, doubling=True)
        timeline = simulate(schedule)
        assert timeline.idle == pytest.approx(ratio(D=d, N=n))
        assert max(timeline.peak) == 2 * d
        # Two forwards as one hand on their results later: as a single unit without doubling, (D-2)/(3N/2+D-2).
        as_one = simulate(schedule, Costs(pair=2.0))
        assert as_one.idle == pytest.approx((d - 2) / (1.5 * n + d - 2))
        # "removes the intermediate bubbles": every rank works without a gap between its first and last action but
        # in the ramps, while direct concatenation at T_B = 2 T_F waits in every unit.
        if d > 2:
            assert timeline.idle < as_one.idle < simulate(make("chimera", d, n)).idle


def test_a_doubled_forward_has_nothing_in_between():
    """Two forwards, one stage, one replica, neighbours: what one call on both micro-batches would do."""
    for d in (2, 4, 6):
        schedule = make("chimera:doubling=true", d, 4 * d)
        for row in schedule.actions:
            forwards = [(at, action) for at, action in enumerate(row) if action.kind == "F"]
            for (at, first), (behind, second) in zip(forwards[::2], forwards[1::2], strict=True):
                assert behind == at + 1
                assert first in schedule.paired
                assert second == replace(first, microbatch=first.microbatch + 1)


@pytest.mark.parametrize(("d", "idle"), [(4, 0.6735), (8, 0.8280)])
def test_gems(d, idle):
    assert round(simulate(make("gems", d, 16)).idle, 4) == idle
    ratio = cell(table("chimera_table2.csv"), "GEMS", "bubble_ratio")(D=d)
    assert simulate(make("gems", d, 512)).idle == pytest.approx(ratio, abs=1e-3)


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 2, 1), (3, 3, 2)])
@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_dualpipe_with_pairs_as_one_action(pp, costs):
    """(PP/2 - 1)(F&B + B - 3W) of waiting, for both; half of it, at T_F = T_I = T_W, if a pair runs F then B.

    The formula is exact for T_F = T_I; at (3, 2, 2) the schedule waits a fifth longer than it says.
    """
    f, i, w = costs
    waiting = (pp / 2 - 1) * ((f + i + w) + (i + w) - 3 * w)
    dualpipe, half = make("dualpipe", pp, 4 * pp), make("dualpipe_v", pp // 2, 2 * pp)
    for schedule in (dualpipe, half):
        timeline = simulate(schedule, Costs(f, i, w, pair=f + i + w))
        assert timeline.makespan * timeline.idle == pytest.approx(waiting, abs=1e-9)
        assert max(timeline.peak) == (pp + 1) * (1 if schedule is dualpipe else 1 / 2)
    if costs == (1, 1, 1):
        timeline = simulate(dualpipe)
        assert timeline.makespan * timeline.idle == pytest.approx(waiting / 2, abs=1e-9)


def test_a_pair_that_hides_its_communication_is_faster_than_its_parts():
    schedule = make("dualpipe", 4, 16)
    times = [simulate(schedule, Costs(pair=pair)).makespan for pair in (2.5, 3.0)]
    assert times[0] < times[1]


def test_the_readme_of_zero_bubble():
    """Bubble rates in units of B = (p-1)/(m+p-1), activations in those of 1F1B; 1/2 and 1/3 as p grows."""
    rows = table("zb_readme_comparison.csv")
    memory = {name: [] for name in ("V-Half", "V-Min")}
    for p in (4, 8, 16):
        m = 4 * p
        for name in memory:
            memory[name].append(max(peak_activations(make(name, p, m))) / p)
    for p in (4, 8):
        m = 4 * p
        one_f_one_b = simulate(make("1f1b", p, m))
        assert one_f_one_b.idle == pytest.approx(cell(rows, "bubble_rate", "1F1B")(p=p, m=m))
        for name, column in (("zb_1p", "ZB1P"), ("zb_2p", "ZB2P"), ("zb_v", "ZBV")):
            wanted = cell(rows, "bubble_rate", column)(B=one_f_one_b.idle)
            # B/3 is ZB-1p's waiting over 1F1B's time; over its own, which is shorter, it is (p-1)/(3m+p-1).
            own = wanted if wanted == 0 else (p - 1) / (3 * m + p - 1)
            assert simulate(make(name, p, m)).span == pytest.approx(own, abs=1e-9)
            ratio = cell(rows, "activation_memory_vs_1F1B", column)()
            assert max(peak_activations(make(name, p, m))) == ratio * p
    assert memory["V-Half"] == [3 / 4, 5 / 8, 9 / 16]  # (p/2 + 1) / p
    assert memory["V-Min"] == [2 / 4, 4 / 8, 6 / 16]
    halves, thirds = (cell(rows, "activation_memory_vs_1F1B", name)() for name in memory)
    assert memory["V-Half"][-1] - halves == pytest.approx(1 / 16)  # one micro-batch more, whatever p is
    assert memory["V-Min"][-1] - thirds == pytest.approx(2 / 3 / 16)


def test_v_half_and_v_min_by_the_readmes_bubble():
    rows = table("zb_readme_comparison.csv")
    for p in (4, 8):
        one_f_one_b = simulate(make("1f1b", p, 4 * p)).idle
        half = simulate(make("v_half", p, 4 * p)).span
        assert half <= cell(rows, "bubble_rate", "V-Half")(B=one_f_one_b) + 1e-9
        least = simulate(make("v_min", p, 4 * p)).span
        # "2B/3 + O(n) overhead"
        assert least == pytest.approx(2 * one_f_one_b / 3, rel=0.25)


def test_the_share_of_activations_that_a_weight_gradient_needs():
    """Table 1: of s b (34 h + 5 a s) bytes a layer, 32 s b h are for W: M_W / M_B."""
    rows = table("zb_table1_flops_memory.csv")
    bytes_of = {
        row["pass"]: row["activation_memory_bytes"].replace("b*(", "*b*(").replace("s**b", "s*b") for row in rows
    }
    numbers = {"s": 1024, "b": 6, "h": 2304, "a": 24}
    whole, kept = (eval(bytes_of[kind], {"__builtins__": {}}, numbers) for kind in "BW")
    assert kept / whole == pytest.approx(32 / (34 + 5 * 24 * 1024 / 2304))
    held = peak_activations(make("zb_h1", 4, 8), kept / whole)
    assert held == pytest.approx([4 - rank + rank * kept / whole for rank in range(4)])
