"""The numbers that the ZeRO paper prints, every cell, and the calculator that prints them."""

import json

import pytest

from lightning_parallel import cli
from lightning_parallel.measure.collective_costs import COLLECTIVES, Link, estimate
from lightning_parallel.zero.accounting import (
    NAMES,
    STAGES,
    StateBytes,
    bytes_by_kind,
    bytes_per_parameter,
    checkpoint_share,
    largest_model,
    volume_by_collective,
)
from tests.unit.test_published import formula, table

COLUMNS = {"baseline": 0, "P_os": 1, "P_os_g": 2, "P_os_g_p": 3}
UNITS = {"B": 1e9, "T": 1e12}


def size(text: str) -> float:
    return float(text[:-1]) * UNITS[text[-1]]


def printed_within_one_digit(number: float, text: str) -> bool:
    """The paper rounds some cells and truncates others; each is within one unit of its last digit."""
    digits = len(text.partition(".")[2])
    return abs(number - float(text)) < 10**-digits


@pytest.mark.parametrize("row", table("zero_table1_memory_per_device_gb.csv"), ids=lambda row: row["model"])
def test_table_1(row):
    parameters, ranks = size(row["model"]), int(row["dp_degree"])
    for column in ("P_os", "P_os_g", "P_os_g_p"):
        gigabytes = parameters * float(bytes_per_parameter(COLUMNS[column], ranks)) / 1e9
        assert printed_within_one_digit(gigabytes, row[column]), (column, gigabytes)
        assert f"{gigabytes:.4f}" == row[f"formula_{column}"]


@pytest.mark.parametrize("row", table("zero_table2_max_model_size.csv"), ids=lambda row: f"mp-{row['mp']}")
def test_table_2(row):
    """The paper computes one copy of the model to three digits, and multiplies (0.5T is 512B)."""
    mp = int(row["mp"])
    assert int(row["gpus"]) == 64 * mp
    for column, stage in COLUMNS.items():
        one = round(largest_model(stage, 64, 32 * 10**9) / 1e9, 1)
        assert largest_model(stage, 64, 32 * 10**9, model_parallel=mp) == pytest.approx(mp * one * 1e9, rel=0.01)
        printed = size(row[column]) / 1e9
        assert printed == pytest.approx(mp * one, rel=0.025 if row[column].endswith("T") else 1e-9)


@pytest.mark.parametrize("row", table("zero_fig1.csv"), ids=lambda row: row["stage"])
def test_figure_1(row):
    stage = COLUMNS[row["stage"]]
    gigabytes = 7.5 * float(bytes_per_parameter(stage, 64))
    assert printed_within_one_digit(gigabytes, row["GB"])
    text = row["formula"].replace("2Psi", "2*Psi")
    assert eval(text, {"__builtins__": {}}, {"K": 12, "Psi": 7.5, "N_d": 64}) == pytest.approx(gigabytes)


def test_table_of_communication():
    rows = {row["config"]: row for row in table("zero_comm_volume.csv")}
    for stage, name in enumerate(("DP all-reduce", "P_os", "P_os_g", "P_os_g_p")):
        moved = sum(volume_by_collective(stage).values())
        assert moved / sum(volume_by_collective(0).values()) == float(rows[name]["relative_to_DP"])
        assert moved == {"2*Psi": 2}.get(rows[name]["volume"], rows[name]["volume"].count("Psi"))
    assert checkpoint_share(1024, 4096, 24) < 0.10


def test_formulas_in_the_words_of_the_paper():
    for ranks in (1, 2, 3, 7, 64, 1024):
        n = float(ranks)
        found = [float(bytes_per_parameter(stage, ranks)) for stage in STAGES]
        assert found == pytest.approx([16, 4 + 12 / n, 2 + 14 / n, 16 / n])
        single = [float(bytes_per_parameter(stage, ranks, StateBytes(4, 4, 8))) for stage in STAGES]
        assert single == pytest.approx([16, 8 + 8 / n, 4 + 12 / n, 16 / n])


@pytest.mark.parametrize(("stage", "ranks", "what"), [(4, 2, "stage=4"), (1, 0, "ranks=0"), (None, 2, "stage=None")])
def test_what_there_is_not_is_refused(stage, ranks, what):
    with pytest.raises(ValueError, match=what):
        bytes_by_kind(stage, ranks)
    if ranks:
        with pytest.raises(ValueError, match=what):
            volume_by_collective(stage)


@pytest.mark.parametrize("row", table("collective_costs.csv"), ids=lambda row: row["collective"])
def test_costs_of_collectives(row):
    ours = {"reduce-to-one": "reduce", "allgather": "all_gather", "allreduce": "all_reduce"}
    name = ours.get(row["collective"], row["collective"].replace("-", "_"))
    rows = [row]
    for p in (1, 2, 4, 8):
        for kind, link in (("alpha", Link(1, 0)), ("beta", Link(0, 1)), ("gamma", Link(0, 0, 1))):
            wanted = _coefficient(rows, row["collective"], kind, p, 1000.0)
            assert estimate(name, p, 1000.0, link) == pytest.approx(wanted), (p, kind)


def _coefficient(rows, collective, kind, p, n):
    from math import log2

    answer = formula(rows, "collective", collective, f"{kind}_coeff")
    return answer(p=p, n=n, log2=log2)


def test_a_collective_without_a_formula():
    with pytest.raises(ValueError, match="no formula for 'all_to_all'; there are reduce_scatter, all_gather"):
        estimate("all_to_all", 2, 1.0, Link(0, 0))
    assert all(estimate(name, 1, 8.0, Link(1, 1, 1)) == 0 for name in COLLECTIVES)


def test_the_command_in_bytes(capsys):
    assert cli.main(["memory", "--params", "7.5e9", "--ranks", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "baseline": 120_000_000_000,
        "zero_1": 31_406_250_000,
        "zero_2": 16_640_625_000,
        "zero_3": 1_875_000_000,
    }


def test_the_command_for_people(capsys):
    assert cli.main(["memory", "--params", "7.5e9", "--ranks", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "P = 7.5e+09 parameters on N = 64 ranks, GB (10^9 bytes) a rank; activations come on top"
    assert lines[2].split() == ["stage", "parameters", "gradients", "optimizer", "all", "formula", "moved"]
    assert lines[3].split() == ["baseline", "15", "15", "90", "120", "(2", "+", "2", "+", "12)", "P", "2P"]
    assert [line.split()[0] for line in lines[3:]] == list(NAMES.values())
    assert lines[6].split()[:5] == ["zero_3", "0.2344", "0.2344", "1.406", "1.875"]
    assert lines[6].endswith("(2 + 2 + 12)/N P        3P")


@pytest.mark.parametrize("wrong", ["--params -1 --ranks 2", "--params 7.5 --ranks 2", "--params x --ranks 2"])
def test_the_command_refuses(capsys, wrong):
    with pytest.raises(SystemExit):
        cli.main(["memory", *wrong.split()])
    assert "is no whole number of 1 or more, such as 64, 7.5e9 or 7.5B" in capsys.readouterr().err
