"""BubbleMonitor and TimelineExporter in a real Trainer; what is faked is the clock, through ``strategy.stats``."""

import csv
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_parallel.callbacks import BubbleMonitor, TimelineExporter
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.simulator import Costs, simulate
from tests.traces import replay

SCHEDULE = make("1f1b", 4, 8)
COSTS = Costs(0.010, 0.012, 0.008, communication=0.001)


class FakeStats:
    """Every step took what ``COSTS`` say; counts how often the ranks had to gather."""

    schedule = SCHEDULE
    row_ranks = (3, 2, 1, 0)
    shares = (0.25, 0.25, 0.25, 0.25)

    def __init__(self, trainer=None):
        self.trainer, self.gathers = trainer, []

    @property
    def step(self):
        return self.trainer.global_step

    def trace(self, newest=None):
        return self._of(self.trainer.global_step - 1)

    def keep_calls(self, log):
        """Nothing was said."""

    def last_trace(self):
        return self._of(self.trainer.global_step)

    def _of(self, step):
        self.gathers.append(step)
        return replay(SCHEDULE, COSTS, step=step) if step >= 1 else None


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path, callbacks, steps=5, **options):
    strategy = SingleDeviceStrategy(device=torch.device("cpu"))
    strategy.stats = FakeStats()
    options = {"logger": False, "log_every_n_steps": 2} | options
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=steps,
        callbacks=callbacks,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    strategy.stats.trainer = trainer
    trainer.fit(Line(), DataLoader(torch.ones(64, 4), batch_size=2))
    return trainer


def logged(directory):
    """The rows of the CSV logger's file that hold a bubble, by step."""
    with open(Path(directory) / "metrics.csv", newline="") as file:
        return {int(row["step"]): row for row in csv.DictReader(file) if row.get("parallel/bubble_idle")}


def test_every_logger_gets_bubbles_beside_their_promises(tmp_path):
    loggers = [CSVLogger(tmp_path, name=name) for name in ("one", "two")]
    fit(tmp_path, [BubbleMonitor()], logger=loggers)
    first, second = (logged(logger.log_dir) for logger in loggers)
    assert first == second
    assert list(first) == [1, 3, 5]  # as Lightning counts them; the last one when the training ended
    row = {key: float(value) for key, value in first[3].items() if key.startswith("parallel/")}
    assert row["parallel/bubble_idle_formula"] == row["parallel/bubble_span_formula"] == pytest.approx(3 / 11)
    assert row["parallel/bubble_idle"] == pytest.approx(row["parallel/bubble_idle_expected"], rel=1e-5)
    assert row["parallel/bubble_span"] == pytest.approx(row["parallel/bubble_span_expected"], rel=1e-5)
    assert row["parallel/bubble_idle"] > 3 / 11
    assert row["parallel/step_seconds"] == pytest.approx(simulate(SCHEDULE, COSTS).makespan, rel=1e-5)
    assert row["parallel/step_seconds_expected"] == pytest.approx(row["parallel/step_seconds"], rel=1e-5)
    assert row["parallel/busy_seconds/rank_0"] == pytest.approx(8 * 0.030, rel=1e-5)
    assert row["parallel/waiting_seconds/rank_3"] > row["parallel/waiting_seconds/rank_0"] > 0
    assert row["parallel/transfer_seconds/rank_1"] > 0


def test_ranks_gather_on_the_steps_that_log_and_at_the_end(tmp_path):
    trainer = fit(tmp_path, [BubbleMonitor()], steps=7, log_every_n_steps=3)
    assert trainer.strategy.stats.gathers == [2, 5, 7]
    trainer = fit(tmp_path, [BubbleMonitor(every_n_steps=2)], steps=7, log_every_n_steps=3)
    assert trainer.strategy.stats.gathers == [1, 3, 5, 7]


def test_an_accumulated_step_gathers_once(tmp_path):
    trainer = fit(tmp_path, [BubbleMonitor(every_n_steps=1)], steps=3, accumulate_grad_batches=4)
    assert trainer.strategy.stats.gathers == [0, 1, 2, 3]


def test_the_summary_is_of_the_last_fit(tmp_path):
    monitor = BubbleMonitor(every_n_steps=1)
    assert monitor.summary() == "bubble: no step was measured"
    fit(tmp_path, [monitor], steps=9)
    fit(tmp_path, [monitor], steps=4)
    idle, step = simulate(SCHEDULE, COSTS).idle, simulate(SCHEDULE, COSTS).makespan
    assert monitor.step_ratio() == pytest.approx(1.0)
    assert monitor.summary() == (
        f"bubble measured {idle:.4f} beside formula (D-1)/(M+D-1) = 0.2727, the schedule with the measured action "
        f"times {idle:.4f} (1f1b, 4 stages, 8 micro-batches; idle share, median of 4 steps); step {step:.4g} s beside "
        f"{step:.4g} s simulated with these times, median ratio 1.0000"
    )


def test_no_logging_at_all_reads_the_last_step_only(tmp_path):
    trainer = fit(tmp_path, [BubbleMonitor()], log_every_n_steps=0)
    assert trainer.strategy.stats.gathers == [5]


def test_pictures_and_traces_are_written_in_the_log_folder(tmp_path):
    exporter = TimelineExporter(every_n_steps=3)
    logger = CSVLogger(tmp_path)
    fit(tmp_path, [exporter], steps=4, logger=logger)
    folder = Path(logger.log_dir) / "timeline"
    assert exporter.files == [folder / f"step_{step:06d}.{suffix}" for step in (2, 4) for suffix in ("png", "json")]
    assert sorted(folder.iterdir()) == sorted(exporter.files)
    assert (folder / "step_000004.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "step_000002.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2}


def test_a_last_step_that_is_due_is_written_once(tmp_path):
    exporter = TimelineExporter(dirpath=tmp_path / "one", every_n_steps=4)
    fit(tmp_path, [exporter], steps=4)
    assert [path.name for path in exporter.files] == ["step_000004.png", "step_000004.json"]


def test_pictures_go_where_the_user_says_and_both_callbacks_share_a_trace(tmp_path):
    monitor, exporter = BubbleMonitor(), TimelineExporter(dirpath=tmp_path / "mine")
    fit(tmp_path, [monitor, exporter], steps=2)
    assert [path.name for path in exporter.files] == ["step_000002.png", "step_000002.json"]
    assert exporter.files[0].parent == tmp_path / "mine"


@pytest.mark.parametrize("callback", [BubbleMonitor(), TimelineExporter()])
def test_a_strategy_without_a_pipeline_is_refused(callback, tmp_path):
    trainer = Trainer(
        accelerator="cpu", max_steps=1, callbacks=[callback], logger=False, default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    message = (
        f"{type(callback).__name__} measures a pipeline, and the Trainer uses SingleDeviceStrategy, which has none. "
        r'Use Trainer\(strategy="pipeline_1f1b", ...\), or remove the callback.'
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(Line(), DataLoader(torch.ones(4, 4)))


@pytest.mark.parametrize("number", [0, 2.5, "5", True])
@pytest.mark.parametrize("callback", [BubbleMonitor, TimelineExporter])
def test_a_number_of_steps_below_one_is_refused(callback, number):
    with pytest.raises(ValueError, match=rf"{callback.__name__}\(every_n_steps={number!r}\) needs 1 or more"):
        callback(every_n_steps=number)
