"""What monitors measured in ranks that were forked is in the process that called the Trainer, as rank 0 has it."""

import pytest
import torch
from lightning.pytorch import Callback

from lightning_parallel.callbacks import (
    BubbleMonitor,
    CommunicationMonitor,
    MemoryMonitor,
    StalenessMonitor,
    TimelineExporter,
)
from lightning_parallel.strategies import ParameterServerStrategy, PipelineStrategy, ZeROStrategy
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import make_trainer

pytestmark = pytest.mark.timeout(60)


def pipeline():
    return PipelineStrategy(num_microbatches=4, start_method="fork")


def zero():
    return ZeROStrategy(stage=2, start_method="fork")


class Notes(Callback):
    """Writes down on rank 0 what its monitors say in the end."""

    def __init__(self, path, monitors, says):
        self.path, self.monitors, self.says = path, monitors, says

    def on_fit_end(self, trainer, module):
        if trainer.is_global_zero:
            torch.save([self.says(monitor) for monitor in self.monitors], self.path)


def bubble(monitor):
    return [monitor.summary(), monitor.step_ratio()]


def files(monitor):
    return [str(path) for path in monitor.files]


def reading(monitor):
    return [monitor.summary(), monitor.reading.metrics()]


def communication(monitor):
    return [monitor.summary(), monitor.metrics(), monitor.backwards]


@pytest.mark.parametrize(("strategy", "make", "says", "begins"), [
    (pipeline, lambda folder: BubbleMonitor(), bubble, "bubble measured "),
    (pipeline, lambda folder: TimelineExporter(folder), files, "/"),
    (pipeline, lambda folder: MemoryMonitor(), reading, "memory peak "),
    (zero, lambda folder: MemoryMonitor(), reading, "memory peak "),
    (zero, lambda folder: CommunicationMonitor(), communication, "communication: moved "),
    (ParameterServerStrategy, lambda folder: StalenessMonitor(), reading, "staleness of "),
], ids=["bubble", "timeline", "memory", "memory_zero", "communication", "staleness"])  # fmt: skip
def test_what_rank_0_measured_comes_back(strategy, make, says, begins, tmp_path):
    """Of two of one kind each has its own."""
    monitors = [make(tmp_path / name) for name in ("first", "second")]
    notes = Notes(tmp_path / "notes", monitors, says)
    trainer = make_trainer(strategy(), 2, [*monitors, notes], max_epochs=1, limit_val_batches=0)
    torch.manual_seed(1)
    trainer.fit(Classifier(), row_loader((8,) * 4), row_loader())
    noted = torch.load(tmp_path / "notes", weights_only=False)
    assert [says(monitor) for monitor in monitors] == noted
    assert all(first.startswith(begins) for first, *_ in noted)
