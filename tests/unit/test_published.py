"""The numbers and formulas that the papers print, read from ``tests/published`` and met by the simulator."""

import csv
import math
from pathlib import Path

import pytest

from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.schedules.formulas import bubble_formula
from lightning_parallel.pipeline.simulator import Costs, peak_activations, simulate

PUBLISHED = Path(__file__).parents[1] / "published"
T_F, T_I, T_W = 1.0, 0.75, 0.5  # exact in binary, so that sums compare exactly
MICROBATCHES = range(1, 65)
QUICK = (1, 2, 3, 4, 8)
EVERY_D = pytest.mark.parametrize(
    "d", [pytest.param(d, marks=() if d in QUICK else pytest.mark.slow) for d in range(1, 17)]
)


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


@pytest.mark.parametrize("row", table("zb_table5.csv"), ids=lambda row: f"{row['model']}-p{row['p']}-m{row['m']}")
def test_zero_bubble_table_5_from_table_9(row):
    f, i, w, hop = (float(row[name]) for name in ("T_F", "T_I", "T_W", "T_comm"))
    p, m, costs = int(row["p"]), int(row["m"]), Costs(f, i, w, communication=hop)
    given = {"weight_share": 0.5, "costs": costs}  # at most half of a micro-batch is kept for W in all of these models
    schedules = {"1F1B": {}, "ZB-H1": {}, "ZB-H2": {}, "ZB-1p": given, "ZB-2p": given}
    for name, options in schedules.items():
        schedule = make(name.lower(), p, m, **options)
        assert f"{simulate(schedule, costs).span:.4f}" == f"0{row[name]}", name
        if options:
            assert max(peak_activations(schedule, 0.5)) <= int(name[3]) * p


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
        ("ZB-H1", make("zb_h1", p, 4 * p)),
        ("ZB-H2", make("zb_h2", p, 4 * p)),
        ("ZB-V (T_F=T_B=T_W)", make("zb_v", p, 4 * p)),
    ):
        stages = schedule.num_stages // p
        timeline = simulate(schedule, Costs(T_F / stages, T_F / stages, T_F / stages))
        bubble = formula(rows, "schedule", name, "bubble_size")(p=p, T_F=T_F, T_B=T_F, T_W=T_F)
        memory = formula(rows, "schedule", name, "peak_activation_memory")(p=p, M_B=1)
        each = formula(rows, "schedule", name, "memory_of_worker_i")
        cost = max(row[-1].end - row[0].start for row in timeline.spans)
        assert close(cost - 4 * p * 3 * T_F, bubble), name
        assert max(timeline.peak) == memory, name
        for share in (0.5, 1.0):
            wanted = [each(p=p, i=rank + 1, M_B=1, M_W=share) for rank in range(p)]
            if "ZB-V" in name and share < 1:  # the table's is an upper bound
                assert max(peak_activations(schedule, share)) <= max(wanted)
            else:
                assert peak_activations(schedule, share) == wanted, name


@pytest.mark.parametrize("p", range(2, 9))
def test_zero_bubble_few_micro_batches(p):
    iteration = formula(table("zb_table2_formulas.csv"), "schedule", "1F1B, m<=p, iteration time", "bubble_size")
    for m in range(1, p + 1):
        timeline = simulate(make("1f1b", p, m), Costs(T_F, T_I, T_W))
        assert timeline.makespan == iteration(m=m, p=p, T_F=T_F, T_B=T_I, T_W=T_W)
    text = table("zb_table2_formulas.csv")[-2]
    assert text["schedule"] == "ZB-1p=ZB-2p, m<=p, iteration time"
    iteration = formula([text], "schedule", text["schedule"], "bubble_size")
    costs = Costs(T_F, T_I, T_W)
    for m in range(1, p + 1):
        for name in ("zb_1p", "zb_2p"):
            timeline = simulate(make(name, p, m, costs=costs), costs)
            assert timeline.makespan == iteration(m=m, p=p, T_F=T_F, T_B=T_I, T_W=T_W), name
