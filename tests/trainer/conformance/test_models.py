"""Models of many kinds and precisions train as in one process.

Language models, tied weights over stages and every precision under the pipeline are in ``test_parity.py``; random
numbers, which one process draws otherwise, and BatchNorm in micro-batches are in ``test_streams_and_statistics.py``.
"""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from tests.trainer.conformance.runs import OnRankZero, Run, Suite, core, whole_batches, within
from tests.trainer.modules import CLASSES, WIDTH, Classifier, Mlp, chain, row_loader, rows
from tests.trainer.pipelines import BF16, Case, assert_same, many_on_stages, one_process

RAGGED = (8, 5, 8, 3)


def fit(run: Run, module: LightningModule, **options: Any) -> Any:
    trainer = run.trainer(**{"max_epochs": 2, **options})
    trainer.fit(module, row_loader(RAGGED), row_loader((5,)))
    [validated] = trainer.validate(module, row_loader((8, 3)), verbose=False)
    return validated


@within(BF16)
@core
def mixed_precision(run: Run) -> Any:
    return fit(run, Classifier(), precision="bf16-mixed", gradient_clip_val=1.0)


@within(BF16)
def true_bf16(run: Run) -> Any:
    return fit(run, Classifier(), precision="bf16-true", max_epochs=1)


@within({"rtol": 1e-12, "atol": 1e-12})
def double_precision(run: Run) -> Any:
    return fit(run, Classifier(), precision="64-true")


def no_container(run: Run) -> Any:
    return fit(run, Mlp())


class Tied(Classifier):
    """The first and the last layer share a weight; in the middle two layers do."""

    def __init__(self) -> None:
        super().__init__(chain(8))
        self.net[14] = nn.Linear(WIDTH, WIDTH)
        self.net[14].weight = self.net[0].weight
        self.net[6].weight = self.net[4].weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0] * self.scale) * self.scale, batch[1])


@core
def tied_weights(run: Run) -> Any:
    return fit(run, Tied())


@core
@whole_batches
def batch_norm(run: Run) -> Any:
    return fit(run, Classifier(chain(6, between=lambda: nn.BatchNorm1d(WIDTH))))


@within({"rtol": 1e-12, "atol": 1e-12})
@whole_batches
def batch_norm_in_double_precision(run: Run) -> Any:
    return fit(run, Classifier(chain(6, between=lambda: nn.BatchNorm1d(WIDTH))), precision="64-true")


class Remembers(nn.Module):
    """A block with buffers: one that is saved, one that is not, one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.1)
            self.calls.add_(1)
        return torch.tanh(y - self.mean)


class WithBuffers(Classifier):
    """Blocks with buffers, and buffers of the module's own."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(Remembers() for _ in range(4)), nn.Linear(WIDTH, CLASSES)))
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5]))
        self.register_buffer("temperature", torch.tensor(2.0), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        each = F.cross_entropy(self(batch[0]) / self.temperature, batch[1], reduction="none")
        return (each * self.weight[batch[1]]).mean()


@core
@whole_batches
def buffers(run: Run) -> Any:
    module = WithBuffers()
    return fit(run, module), OnRankZero(sorted(module.state_dict()))


class NoDropout(Classifier):
    """Dropout is off in evaluation, whatever it draws in training."""

    def __init__(self) -> None:
        super().__init__(chain(6, between=lambda: nn.Dropout(0.5)))


def dropout_in_evaluation(run: Run) -> Any:
    [validated] = run.trainer().validate(NoDropout(), row_loader((8, 3)), verbose=False)
    return validated


class Data(LightningDataModule):
    """Loaders from a datamodule, with hooks that change a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        assert not self.calls

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.rows = rows(RAGGED)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows, batch_size=None)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows[:2], batch_size=None)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"calls": list(self.calls)}


class Built(Classifier):
    """Saves its arguments, and builds a layer in `setup`."""

    def __init__(self, width: int = WIDTH, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.extra = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.net(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


def a_datamodule_and_a_setup_hook(run: Run) -> Any:
    data, module = Data(), Built(learning_rate=0.2)
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, data)
    path = run.folder / "end.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False) if trainer.is_global_zero else {}
    return data.calls, OnRankZero([saved.get(key) for key in ("hyper_parameters", "Data")])


class Twice(Classifier):
    """Two views of the rows; validates so, too."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + super().loss((-batch[0], batch[1]))


def model_called_twice(run: Run) -> Any:
    return fit(run, Twice())


suite = Suite(
    mixed_precision, true_bf16, double_precision, no_container, tied_weights, batch_norm, buffers,
    batch_norm_in_double_precision, dropout_in_evaluation, a_datamodule_and_a_setup_hook, model_called_twice,
)  # fmt: skip


@suite.for_each_strategy
def test_as_in_one_process(entry, scenario, tmp_path):
    suite.check(entry, scenario, tmp_path)


class Padded(Classifier):
    """Blocks without parameters before or after those that have some."""

    def __init__(self, before: int, after: int) -> None:
        layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)]
        super().__init__(
            nn.Sequential(*(nn.Tanh() for _ in range(before)), *layers, *(nn.Softsign() for _ in range(after)))
        )


def test_a_stage_without_parameters():
    """Under the pipeline, which is told where to cut."""
    cases = [
        Case(lambda: Padded(2, 0), row_loader, {"partition": [2, 2]}, {"gradient_clip_val": 0.1}),
        Case(lambda: Padded(0, 2), row_loader, {"partition": [2, 2]}, {"gradient_clip_val": 0.1}),
    ]
    for case, records in zip(cases, many_on_stages(cases, 2), strict=True):
        assert_same(records, one_process(case))
