"""The measures of a bubble, on spans written by hand and on replayed schedules."""

import pytest

from lightning_parallel.measure import Span, StepTrace, bubble
from lightning_parallel.measure.reading import BubbleHistory, BubbleReading, formula_of
from lightning_parallel.pipeline import Schedule
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.simulator import Costs, simulate
from tests.traces import replay

ROWS = (
    (
        Span("F", 0, 0, 10.0, 11.0),
        Span("send", 0, 0, 11.0, 11.5),
        Span("recv", 0, 0, 11.0, 15.0),
        Span("B", 0, 0, 15.0, 17.0),
    ),
    (
        Span("recv", 1, 0, 10.5, 11.5),
        Span("F", 1, 0, 11.5, 12.5),
        Span("B", 1, 0, 12.5, 14.5),
        Span("send", 1, 0, 14.5, 15.0),
    ),
)
TRACE = StepTrace(0, Schedule.from_text("0F0 0B0 / 1F0 1B0"), ROWS)


def test_seconds_by_hand():
    assert bubble.busy_seconds(ROWS) == (3.0, 3.0)
    assert bubble.waiting_seconds(TRACE) == (3.5, 0.5)
    assert bubble.transfer_seconds(TRACE) == (0.5, 0.5)
    assert bubble.span_seconds(ROWS) == (7.0, 3.0)
    assert bubble.makespan(ROWS) == 7.0
    assert bubble.idle_of(ROWS) == pytest.approx(1 - 6 / 14)
    assert bubble.span_of(ROWS) == pytest.approx(1 - 3 / 7)


def test_no_time_is_no_bubble():
    assert bubble.idle_of(((), ())) == 0.0
    assert bubble.span_of(((Span("F", 0, 0, 1.0, 1.0),),)) == 0.0


def test_clocks_that_round_never_make_a_bubble_negative():
    rows = ((Span("F", 0, 0, 0.0, 1.0), Span("B", 0, 0, 0.999, 2.0)),)
    assert bubble.idle_of(rows) == 0.0
    assert bubble.span_of(rows) == 0.0


def test_a_rank_busy_beyond_the_step_is_refused():
    with pytest.raises(ValueError, match=r"Rank 1 was busy for 2\.0 s of 1\.5 s"):
        bubble.idle_ratio([1.0, 2.0], 1.5)
    with pytest.raises(ValueError, match=r"Rank 0 was busy for 1\.0 s of 0\.5 s"):
        bubble.span_ratio([1.0, 1.0], [0.5, 2.0])


def test_measured_costs_by_hand():
    costs = bubble.measured_costs(TRACE)
    assert costs.forward == [1.0, 1.0]
    assert costs.backward == [2.0, 2.0]
    assert costs.communication == {(0, 1): 0.5, (1, 0): 0.5}


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("hop", [0.0, 0.25])
def test_costs_come_back_from_a_replay(name, hop):
    costs = Costs(1.0, 0.75, 0.5, communication=hop)
    schedule = make(name, 4, 6)
    trace = replay(schedule, costs)
    reading = BubbleReading.of(trace)
    expected = simulate(schedule, costs)
    assert reading.idle == pytest.approx(expected.idle)
    assert reading.span == pytest.approx(expected.span)
    assert reading.idle_expected == pytest.approx(reading.idle)
    assert reading.span_expected == pytest.approx(reading.span)


def test_split_backwards_come_back_too():
    schedule = Schedule.from_text("0F0 0F1 0I0 0W0 0I1 0W1 / 1F0 1I0 1F1 1I1 1W0 1W1")
    trace = replay(schedule, Costs(2.0, 1.0, 0.5, communication=0.25))
    costs = bubble.measured_costs(trace)
    assert (costs.forward, costs.input_grad, costs.weight_grad) == ([2.0, 2.0], [1.0, 1.0], [0.5, 0.5])
    assert BubbleReading.of(trace).idle_expected == pytest.approx(bubble.idle_of(trace.rows))


def test_time_lost_between_actions_is_measured_and_not_expected():
    reading = BubbleReading.of(replay(make("1f1b", 4, 8), overhead=0.5))
    assert reading.formula == pytest.approx(3 / 11)
    assert reading.idle > reading.idle_expected + 0.1


def test_a_reading_has_the_log_keys():
    reading = BubbleReading.of(replay(make("1f1b", 2, 4)))
    metrics = reading.metrics(row_ranks=(1, 0), planned_shares=(0.4, 0.6))
    seconds = [f"parallel/{kind}_seconds/rank_{rank}" for rank in (1, 0) for kind in ("busy", "waiting", "transfer")]
    bubbles = [f"parallel/bubble_{kind}{of}" for kind in ("idle", "span") for of in ("", "_expected", "_formula")]
    shares = [f"parallel/stage_share{of}/stage_{stage}" for of in ("", "_planned") for stage in (0, 1)]
    steps = ["parallel/step_seconds", "parallel/step_seconds_expected"]
    assert sorted(metrics) == sorted(bubbles + seconds + shares + steps)
    assert metrics["parallel/step_seconds"] == pytest.approx(15.0)  # (M + D - 1)(T_F + T_B)
    assert metrics["parallel/step_seconds_expected"] == pytest.approx(15.0)
    assert metrics["parallel/stage_share/stage_1"] == pytest.approx(1 / 2)
    assert metrics["parallel/stage_share_planned/stage_1"] == 0.6
    assert metrics["parallel/bubble_idle"] == pytest.approx(1 / 5)
    assert metrics["parallel/bubble_idle_formula"] == pytest.approx(1 / 5)
    assert metrics["parallel/busy_seconds/rank_0"] == pytest.approx(12.0)
    assert metrics["parallel/waiting_seconds/rank_1"] > 0


def test_a_schedule_of_the_users_own_has_no_formula():
    mine = Schedule.from_text("0F0 0F1 0B1 0B0 / 1F0 1F1 1B1 1B0", name="gpipe")
    assert formula_of(mine) is None
    assert "parallel/bubble_idle_formula" not in BubbleReading.of(replay(mine)).metrics((0, 1))


def test_a_summary_reads_the_medians():
    history = BubbleHistory()
    assert history.summary() == "bubble: no step was measured"
    for step, overhead in enumerate([0.0, 0.0, 5.0]):
        history.add(replay(make("gpipe", 2, 4), step=step, overhead=overhead))
    assert history.summary() == (
        "bubble measured 0.2000 beside formula (D-1)/(M+D-1) = 0.2000, the schedule with the measured action "
        "times 0.2000 (gpipe, 2 stages, 4 micro-batches; idle share, median of 3 steps)"
        "; step 15 s beside 15 s simulated with these times, median ratio 1.0000"
    )


def test_a_step_is_timed_beside_the_simulator():
    """By hand: first action at 10, last end at 17; F 1, B 2, hops 0.5: 1 + .5 + 1 + 2 + .5 + 2 simulated."""
    reading = BubbleReading.of(TRACE)
    assert (reading.seconds, reading.seconds_expected) == (7.0, 7.0)
    assert BubbleHistory().step_ratio() is None


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "chimera:doubling=true"])
def test_what_the_engine_adds_to_a_step_shows(name):
    """Half a second lost before each action is in the measured step and not in the simulated one."""
    schedule, history = make(name, 4, 8), BubbleHistory()
    plain, slowed = (simulate(schedule, Costs(c, c, c, backward=2 * c - o)).makespan for c, o in ((1.0, 0), (1.5, 0.5)))
    history.add(replay(schedule, overhead=0.0))
    assert history.readings[0].seconds == pytest.approx(history.readings[0].seconds_expected)
    history = BubbleHistory()
    reading = history.add(replay(schedule, overhead=0.5))
    assert reading.seconds == pytest.approx(slowed - 0.5)  # the first action begins when its half second is over
    assert reading.seconds_expected == pytest.approx(plain, rel=0.02)  # hops are taken to be what waits show
    assert history.step_ratio() == pytest.approx((slowed - 0.5) / plain, rel=0.02)
