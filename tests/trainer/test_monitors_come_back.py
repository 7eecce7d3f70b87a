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


def summary_and(*names):
    """What a monitor says, and what it gives under these names."""

    def says(monitor):
        values = [getattr(monitor, name) for name in names]
        return [monitor.summary(), *(value() if callable(value) else value for value in values)]

    return says


@pytest.mark.parametrize(("strategy", "make", "says"), [
    (pipeline, lambda folder: BubbleMonitor(), summary_and("step_ratio")),
    (pipeline, lambda folder: TimelineExporter(folder / "timeline"), lambda monitor: list(map(str, monitor.files))),
    (pipeline, lambda folder: MemoryMonitor(), lambda monitor: [monitor.summary(), monitor.reading.metrics()]),
    (zero, lambda folder: MemoryMonitor(), lambda monitor: [monitor.summary(), monitor.reading.metrics()]),
    (zero, lambda folder: CommunicationMonitor(), summary_and("metrics", "backwards")),
    (ParameterServerStrategy, lambda folder: StalenessMonitor(), lambda m: [m.summary(), m.reading.metrics()]),
], ids=["bubble", "timeline", "memory", "memory_zero", "communication", "staleness"])  # fmt: skip
def test_what_rank_0_measured_comes_back(strategy, make, says, tmp_path):
    """Of two of one kind each has its own; before the run they say something else."""
    monitors = [make(tmp_path / name) for name in ("first", "second")]
    before = says(monitors[0]) if not isinstance(monitors[0], MemoryMonitor | StalenessMonitor) else []
    trainer = make_trainer(strategy(), 2, [*monitors, Notes(tmp_path / "notes", monitors, says)], max_epochs=1)
    torch.manual_seed(1)
    trainer.fit(Classifier(), row_loader((8,) * 4), row_loader((8,)))
    noted = torch.load(tmp_path / "notes", weights_only=False)
    assert [says(monitor) for monitor in monitors] == noted
    assert (
        noted[0] != before and "no " not in monitors[0].summary()[:20]
        if hasattr(monitors[0], "summary")
        else before == []
    )
