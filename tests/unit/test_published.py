"""The numbers and formulas that the papers print, read from ``tests/published`` and met by the simulator."""

import csv
import math
from pathlib import Path

import pytest

from lightning_parallel.pipeline import Action, Schedule
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.schedules.formulas import bubble_formula
from lightning_parallel.pipeline.simulator import Costs, simulate

PUBLISHED = Path(__file__).parents[1] / "published"
T_F, T_I, T_W = 1.0, 0.75, 0.5  # exact in binary, so that sums compare exactly
MICROBATCHES = range(1, 65)
EVERY_D = pytest.mark.parametrize("d", range(1, 17))


def table(name):
    """Rows of a published table, its lines of source left out."""
    with open(PUBLISHED / name, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def formula(rows, column, key, answer="formula"):
    """The formula of a row, as a function of its letters."""
    (text,) = [row[answer] for row in rows if row[column] == key]
    return lambda **letters: eval(text.replace("<=", ""), {"__builtins__": {}}, letters)


def close(left, right):
    return math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-12)


def zero_bubble(num_stages, num_microbatches, lag):
    """ZB-H1 (lag 1) and ZB-H2 (lag 2): round x of stage i is F_x, I_{x - lag(D-1-i)}, W_{x - lag(D-1)}; section 2."""
    rows = []
    for stage in range(num_stages):
        delays = {"F": 0, "I": lag * (num_stages - 1 - stage), "W": lag * (num_stages - 1)}
        rounds = range(num_microbatches + lag * (num_stages - 1))
        slots = [(kind, x - delay) for x in rounds for kind, delay in delays.items()]
        rows.append([Action(kind, stage, m) for kind, m in slots if 0 <= m < num_microbatches])
    return Schedule(f"zb-h{lag}", tuple(rows), {(0, stage): stage for stage in range(num_stages)}, num_microbatches)


@pytest.mark.parametrize("row", table("zb_table5.csv"), ids=lambda row: f"{row['model']}-p{row['p']}-m{row['m']}")
def test_zero_bubble_table_5_from_table_9(row):
    f, i, w, hop = (float(row[name]) for name in ("T_F", "T_I", "T_W", "T_comm"))
    p, m = int(row["p"]), int(row["m"])
    schedules = {"1F1B": make("1f1b", p, m), "ZB-H1": zero_bubble(p, m, 1), "ZB-H2": zero_bubble(p, m, 2)}
    for name, schedule in schedules.items():
        assert f"{simulate(schedule, Costs(f, i, w, communication=hop)).span:.4f}" == f"0{row[name]}", name


@EVERY_D
def test_gpipe_and_1f1b_formulas(d):
    """The bubbles of formulas.csv; bubble time, fraction and stashed micro-batches of the Megatron paper."""
    papers, megatron = table("formulas.csv"), table("megatron2021_bubble_formulas.csv")
    pipelined = formula(papers, "quantity", "bubble with pipelining, N inputs")
    bubble_time = formula(megatron, "schedule_or_quantity", "GPipe / 1F1B bubble time")
    ideal_time = formula(megatron, "schedule_or_quantity", "ideal time")
    fraction = formula(megatron, "schedule_or_quantity", "GPipe / 1F1B bubble fraction")
    stashed = formula(megatron, "schedule_or_quantity", "GPipe stashed microbatches")
    at_most = formula(megatron, "schedule_or_quantity", "1F1B stashed microbatches")
    for m in MICROBATCHES:
        letters = {"p": d, "m": m, "t_f": T_F, "t_b": T_I + T_W}
        gpipe, one_f = (simulate(make(name, d, m), Costs(T_F, T_I, T_W)) for name in ("gpipe", "1f1b"))
        for timeline in (gpipe, one_f):
            assert timeline.makespan == bubble_time(**letters) + ideal_time(**letters)
            assert close(timeline.idle / (1 - timeline.idle), fraction(**letters))
            assert close(timeline.idle, pipelined(D=d, N=m))
            assert close(timeline.span, bubble_formula("1f1b", d, m))
        assert gpipe.peak == [stashed(**letters)] * d
        assert max(one_f.peak) == min(m, at_most(**letters))
        # "1F1B latency: same as GPipe, lower memory"
        assert gpipe.makespan == one_f.makespan
        assert sum(one_f.peak) <= sum(gpipe.peak)


@EVERY_D
def test_gpipe_bubble_is_negligible_from_four_micro_batches_a_rank(d):
    assert formula_text("GPipe bubble") == "O((K-1)/(M+K-1)); negligible when M >= 4K"
    assert simulate(make("gpipe", d, 4 * d)).idle < 0.2


def formula_text(quantity):
    (text,) = [row["formula"] for row in table("formulas.csv") if row["quantity"] == quantity]
    return text


@EVERY_D
def test_inference_formulas(d):
    without = formula(table("formulas.csv"), "quantity", "bubble without pipelining (inference)")
    pipelined = formula(table("formulas.csv"), "quantity", "bubble with pipelining, N inputs")
    assert close(simulate(make("naive", d, 1).forward_only()).idle, without(D=d))
    for m in MICROBATCHES:
        assert close(simulate(make("gpipe", d, m).forward_only()).idle, pipelined(D=d, N=m))


@EVERY_D
def test_one_micro_batch_at_a_time(d):
    for m in (1, 2, 7, 64):
        timeline = simulate(make("naive", d, m), Costs(T_F, T_I, T_W))
        assert close(timeline.idle, (d - 1) / d)
        assert close(timeline.span, bubble_formula("naive", d, m))
        assert timeline.peak == [1] * d


@pytest.mark.parametrize("p", range(2, 9))
def test_zero_bubble_table_2(p):
    rows = table("zb_table2_formulas.csv")
    for name, schedule in (
        ("1F1B", make("1f1b", p, 4 * p)),
        ("ZB-H1", zero_bubble(p, 4 * p, 1)),
        ("ZB-H2", zero_bubble(p, 4 * p, 2)),
    ):
        timeline = simulate(schedule, Costs(T_F, T_F, T_F))
        bubble = formula(rows, "schedule", name, "bubble_size")(p=p, T_F=T_F, T_B=T_F, T_W=T_F)
        memory = formula(rows, "schedule", name, "peak_activation_memory")(p=p, M_B=1)
        cost = max(row[-1].end - row[0].start for row in timeline.spans)
        assert close(cost - 4 * p * 3 * T_F, bubble), name
        assert max(timeline.peak) == memory, name


@pytest.mark.parametrize("p", range(2, 9))
def test_zero_bubble_few_micro_batches(p):
    iteration = formula(table("zb_table2_formulas.csv"), "schedule", "1F1B, m<=p, iteration time", "bubble_size")
    for m in range(1, p + 1):
        timeline = simulate(make("1f1b", p, m), Costs(T_F, T_I, T_W))
        assert timeline.makespan == iteration(m=m, p=p, T_F=T_F, T_B=T_I, T_W=T_W)


# Reference idle bubbles at D = 4, T_F = T_I = T_W = 1, no communication, from an independent simulator.
@pytest.mark.parametrize(
    ("name", "bubbles", "peak"),
    [
        ("gpipe", {4: 0.4286, 8: 0.2727, 12: 0.2000, 16: 0.1579}, None),
        ("1f1b", {4: 0.4286, 8: 0.2727, 12: 0.2000, 16: 0.1579}, [4, 3, 2, 1]),
        ("zb-h1", {4: 0.2000, 8: 0.1111, 12: 0.0769, 16: 0.0588}, [4, 4, 4, 4]),
        ("zb-h2", {4: 0.2500, 8: 0.1111, 12: 0.0769, 16: 0.0588}, [7, 7, 7, 7]),
    ],
)
def test_an_independent_simulator_agrees(name, bubbles, peak):
    for m, bubble in bubbles.items():
        lag = {"zb-h1": 1, "zb-h2": 2}.get(name)
        schedule = zero_bubble(4, m, lag) if lag else make(name, 4, m)
        timeline = simulate(schedule)
        assert round(timeline.idle, 4) == bubble
        if m >= 8:
            assert timeline.peak == (peak or [m] * 4)


def test_zero_bubble_schedules_pass_every_check():
    for lag in (1, 2):
        for m in (1, 3, 8):
            zero_bubble(4, m, lag).check(receive_ahead=2)
