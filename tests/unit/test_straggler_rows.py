"""The file from which `benchmarks/ssp_stragglers.py` goes on, and the numbers in its tables, by hand."""

from dataclasses import replace

import pytest
import torch

from benchmarks.ssp_stragglers import SETTINGS, durations, oracle, time_to
from benchmarks.straggler_rows import Row, Rows, tables

BSP = Row("transient", 10, 50.0, 0.5, "bsp", 0, 20.0, 1.0, 12.0, 0.2, 0.5, "2026-01-01")
SSP = replace(BSP, name="ssp_3", seconds=10.0, promised=1.9, to_loss=None, loss=0.5)


def test_a_row_that_was_not_written_to_its_end_is_cut_off(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    assert rows.read() == []
    rows.append(BSP)
    whole = rows.path.read_bytes()
    rows.path.write_bytes(whole + whole[:20])
    assert rows.read() == [BSP]
    rows.append(SSP)
    assert rows.read() == [BSP, SSP]


def test_of_a_run_that_was_made_twice_the_last_counts(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    for row in (BSP, replace(BSP, seconds=19.0), replace(BSP, unit_ms=20.0)):
        rows.append(row)
    assert [row.seconds for row in rows.read()] == [19.0, 20.0]


def test_a_table_compares_with_bsp_of_the_same_draws():
    """Speeds are 20 / 10 and 30 / 10, 1.9 and 2.9 promised; BSP's losses are 0.2 and 0.4, of mean 0.3, sd 0.141."""
    rows = [BSP, SSP, replace(BSP, seed=1, seconds=30.0, loss=0.4), replace(SSP, seed=1, promised=2.9)]
    (text,) = tables(rows)
    bsp, ssp = text.splitlines()[-2:]
    assert [cell.strip() for cell in ssp.split("|")[1:-1]] == [
        "ssp_3", "1.0000 ± 0.0000", "2.50 ± 0.71", "2.40 ± 0.71", "+4.4% ± 1.3%", "yes", "-",
        "0.500 ± 0.000", "+1.4 sd",
    ]  # fmt: skip
    assert "| 12.0 ± 0.0 | 0.300 ± 0.141 | +0.0 sd |" in bsp
    (text,) = tables([BSP, replace(SSP, promised=1.8)])
    assert text.splitlines()[-1].split("|")[5:7] == [" +11.1% ", " **no** "]


def test_the_oracle_and_a_permanently_slow_worker():
    """Finite staleness gains nothing: the run lasts as long as its slowest worker, whatever the rule."""
    units = durations("permanent", 30, 0)
    assert [oracle(units, staleness) for staleness in (0, 3, 10, None)] == [120.0] * 4
    assert set(SETTINGS) == {"transient", "permanent", "extreme"}
    extreme = durations("extreme", 4000, 0)
    assert float((extreme == 41.0).float().mean()) == pytest.approx(0.1, abs=0.01)


def test_the_time_to_a_loss_is_when_the_mean_of_forty_is_below_it():
    steps = torch.stack([torch.arange(60.0), torch.linspace(3.0, 0.0, 60)], 1)
    assert time_to(1.0, steps.flip(0)) == next(
        float(end) for end in range(39, 60) if float(steps[end - 39 : end + 1, 1].mean()) < 1.0
    )
    assert time_to(0.0, steps) is None
