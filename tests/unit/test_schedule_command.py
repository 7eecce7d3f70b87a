"""``lightning-parallel schedule``: what it prints, writes and refuses."""

import json

import pytest

from lightning_parallel.cli.schedule_command import grid, main
from lightning_parallel.pipeline import Schedule
from lightning_parallel.pipeline.schedules import SCHEDULES, make
from lightning_parallel.pipeline.simulator import Costs, simulate

FOUR_BY_EIGHT = ["1f1b", "--stages", "4", "--microbatches", "8"]


def test_json_has_exactly_these_keys(capsys):
    assert main([*FOUR_BY_EIGHT, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == ["schedule", "ranks", "stages", "microbatches", "makespan", "idle", "span", "peak"]
    assert facts["schedule"] == "1f1b"
    assert (facts["stages"], facts["microbatches"], facts["makespan"]) == (4, 8, 33)
    assert facts["idle"] == facts["span"] == pytest.approx(3 / 11)
    assert facts["peak"] == [4, 3, 2, 1]


def test_costs_are_those_of_the_zero_bubble_paper(capsys):
    main(["1f1b", "--stages", "8", "--microbatches", "24", "--costs", "18.522,18.086,9.337,.601", "--json"])
    assert round(json.loads(capsys.readouterr().out)["span"], 4) == 0.2431


def test_the_report_has_the_grid_and_every_number_beside_its_formula(capsys):
    assert main(["1f1b", "--stages", "2", "--microbatches", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b: 2 stages on 2 ranks, 3 micro-batches; F=1 I=1 W=1 (B=I+W), a hop 0",
        "",
        "rank 0  F0 F1 .  .  B0----F2 B1----.  B2----",
        "rank 1  .  F0 B0----F1 B1----F2 B2----.  .",
        "",
        "makespan          12",
        "bubble (idle)     0.2500   formula (D-1)/(M+D-1) = 0.2500, with F = I = W and no communication",
        "bubble (span)     0.2500",
        "peak activations  rank 0: 2, rank 1: 1   (of one full stage and one micro-batch)",
        "receives ahead    1   (posted early, so that no send blocks for ever)",
    ]


def test_a_grid_of_several_stages_a_rank_names_the_stage():
    timeline = simulate(Schedule.from_text("0F0 0F1 2F0 2B0 0B0 2F1 2B1 0B1 / 1F0 1F1 1B0 1B1"))
    assert grid(timeline)[1] == "rank 1  .   1F0 1F1 .   .   1B0-----.   .   .   .   .   1B1-----.   ."
    assert grid(timeline)[0].startswith("rank 0  0F0 0F1 2F0 2B0-----")


def test_a_long_grid_goes_on_below():
    timeline = simulate(make("interleaved_1f1b", 4, 8))
    lines = grid(timeline)
    assert max(map(len, lines)) <= 120
    ends = [at for at, line in enumerate(lines) if not line]
    first, *others = [lines[a + 1 : b] for a, b in zip([-1, *ends], [*ends, len(lines)], strict=True)]
    assert [len(block) for block in others] == [5] * len(others) and len(first) == 4 and len(others) == 2
    for rank, row in enumerate(timeline.rows):
        parts = [first[rank], *(block[1 + rank] for block in others)]
        text = "".join(word for part in parts for word in part.split()[2:]).replace("-", "").replace(".", "")
        assert text == "".join(f"{span.stage}{span.kind}{span.microbatch}" for span in row)
    assert [block[0] for block in others] == ["from 19 on:", "from 38 on:"]  # of 57


def test_times_that_fill_no_whole_columns_are_rounded_and_said_to_be():
    lines = grid(simulate(make("1f1b", 2, 2), Costs(18.522, 18.086, 9.337, communication=0.601)))
    assert lines[0].startswith("rank 0  F0----F1----")
    assert lines[-1] == "(one column is 9.261; rounded to columns)"


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_csv_that_was_written_is_read(name, tmp_path, capsys):
    path = str(tmp_path / f"{name}.csv")
    assert main([name, "--ranks", "4", "--microbatches", "4", "--csv", path, "--json"]) == 0
    assert main([path, "--json"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_a_png_is_written(tmp_path):
    path = tmp_path / "1f1b.png"
    assert main([*FOUR_BY_EIGHT, "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def refused(words, capsys):
    """The message of a call that fails."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.strip()


def test_an_unknown_name_is_told(capsys):
    message = refused(["zbx", "--stages", "4", "--microbatches", "8"], capsys)
    assert message.startswith("lightning-parallel schedule: No schedule is called 'zbx'. There are: naive, gpipe, 1f1b")


def test_numbers_are_asked_for(capsys):
    message = refused(["gpipe", "--stages", "4"], capsys)
    assert message == "lightning-parallel schedule: The schedule gpipe needs --ranks and --microbatches."


def test_a_file_that_is_not_there_is_told(capsys):
    assert "No such file or directory: 'mine.csv'" in refused(["mine.csv"], capsys)


def test_numbers_that_contradict_the_file_are_told(tmp_path, capsys):
    path = str(tmp_path / "mine.csv")
    make("gpipe", 2, 3).to_csv(path)
    message = refused([path, "--stages", "4"], capsys)
    assert message == f"lightning-parallel schedule: {path} has 2 ranks, not --ranks 4. Leave --ranks out."


def test_a_file_that_cannot_run_is_told(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    assert "row 1 at 1B0 (action 0) waits for 1F0 (row 1)" in refused([str(path)], capsys)


@pytest.mark.parametrize("costs", ["1,2", "1,2,3,x", "1,1,1,-1", "nan,1,1,1"])
def test_costs_are_four_numbers(costs, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*FOUR_BY_EIGHT, "--costs", costs])
    assert f"'{costs}' is not four numbers >= 0 apart by commas, such as 1,1,1,0" in capsys.readouterr().err


def test_costs_of_nothing_are_told(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*FOUR_BY_EIGHT, "--costs", "0,0,0,1"])
    assert "gives no action any time" in capsys.readouterr().err
