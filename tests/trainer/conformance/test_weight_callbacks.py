"""Callbacks that hold the model's weights or add to its optimizer: averages, finetuning, the model's summary."""

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    ModelSummary,
    RichModelSummary,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

from tests.trainer.conformance.runs import OnRankZero, Run, Suite, core, whole_batches
from tests.trainer.modules import CLASSES, WIDTH, Classifier, chain, row_loader
from tests.trainer.pipelines import Case, failure_of

if not hasattr(callbacks, "EMAWeightAveraging"):
    pytest.skip("Lightning averages weights from version 2.6 on", allow_module_level=True)
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

LOADERS = (lambda: row_loader((8, 5, 8)), lambda: row_loader((5, 8)))


def weights(trainer: Trainer) -> OnRankZero:
    """The whole model's weights after the run."""
    state = trainer.strategy.lightning_module_state_dict()
    return OnRankZero({name: value.clone() for name, value in state.items()})


def saved(path: Any) -> dict[str, Any]:
    """What of a checkpoint concerns weights and optimizers."""
    loaded = torch.load(path, weights_only=False)
    return {key: loaded[key] for key in loaded if "state" in key and key != "loops"} | {
        "callbacks": loaded["callbacks"]
    }


class Normed(Classifier):
    """Has BatchNorms, whose buffers are averaged too."""

    def __init__(self) -> None:
        super().__init__(chain(4, between=lambda: nn.BatchNorm1d(WIDTH)))


def averaged(run: Run, callback: Callback, module: LightningModule) -> Any:
    """Fit, save when fit has ended."""
    trainer = run.trainer(callback, max_epochs=4)
    trainer.fit(module, *(make() for make in LOADERS))
    trainer.save_checkpoint(run.folder / "end.ckpt")
    return weights(trainer), OnRankZero(saved(run.folder / "end.ckpt"))


@core
def ema(run: Run) -> Any:
    return averaged(run, EMAWeightAveraging(decay=0.5), Classifier())


@whole_batches
def ema_of_buffers(run: Run) -> Any:
    return averaged(run, EMAWeightAveraging(decay=0.5), Normed())


@whole_batches
def plain_average_without_buffers(run: Run) -> Any:
    return averaged(run, WeightAveraging(use_buffers=False), Normed())


class Every(Callback):
    """Saves after every epoch."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def resumed(run: Run, make: Any, module: Any = Classifier, epochs: tuple[int, ...] = (3,)) -> Any:
    """Five epochs, then once more from the checkpoints of some."""
    loaders = [make() for make in LOADERS]
    trainer = run.trainer(make(), Every(run.folder), max_epochs=5)
    trainer.fit(module(), *loaders)
    found = [weights(trainer)]
    for epoch in epochs:
        trainer = run.trainer(make(), max_epochs=5)
        trainer.fit(module(), *loaders, ckpt_path=run.folder / f"{epoch}.ckpt", weights_only=False)
        found.append(weights(trainer))
    return found, OnRankZero(saved(run.folder / "3.ckpt"))


def ema_resumed(run: Run) -> Any:
    return resumed(run, lambda: EMAWeightAveraging(decay=0.5))


def stochastic_weight_averaging(run: Run) -> Any:
    return averaged(run, StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2), Classifier())


@whole_batches
def stochastic_weight_averaging_of_batch_norm(run: Run) -> Any:
    return averaged(run, StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2), Normed())


def stochastic_weight_averaging_resumed(run: Run) -> Any:
    return resumed(run, lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2), Scheduled)


class Scheduled(Classifier):
    """SWA replaces its scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Backbone(Classifier):
    """A backbone and a head."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1))
        self.net = None
        self.backbone, self.head = (
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.backbone:
            x = torch.tanh(layer(x))
        return self.head(x)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class UnfreezesByTurns(BaseFinetuning):
    """Unfreezes two layers of the backbone every epoch, the last ones first."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if 1 <= epoch <= 3:
            layers = pl_module.backbone[6 - 2 * epoch : 8 - 2 * epoch]
            self.unfreeze_and_add_param_group(layers, optimizer, lr=0.05 / epoch)


@core
def finetuning(run: Run) -> Any:
    return resumed(run, UnfreezesByTurns, Backbone, epochs=(1, 3))


def backbone_finetuning(run: Run) -> Any:
    module = Backbone()
    trainer = run.trainer(BackboneFinetuning(unfreeze_backbone_at_epoch=2), max_epochs=4)
    trainer.fit(module, *(make() for make in LOADERS))
    return [len(group["params"]) >= 0 for group in trainer.optimizers[0].param_groups], weights(trainer)


class Shown(Classifier):
    """With an example input and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, WIDTH)
        self.scale = nn.Parameter(torch.ones(CLASSES))
        self.net[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


class Summaries(logging.Handler):
    """Collects the tables that the model's summary prints."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.tables.append(record.getMessage())


def summarized(run: Run, module: LightningModule) -> Any:
    log, handler = logging.getLogger("lightning.pytorch.callbacks.model_summary"), Summaries()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        trainer = run.trainer(ModelSummary(max_depth=2), enable_model_summary=True)
        trainer.fit(module, *(make() for make in LOADERS))
    finally:
        log.removeHandler(handler)
    return OnRankZero(handler.tables)


def summary_of_the_whole_model(run: Run) -> Any:
    return summarized(run, Backbone())


@core
def summary_with_an_example_input(run: Run) -> Any:
    return summarized(run, Shown())


class Noted(RichModelSummary):
    """Keeps what the table is made of."""

    made: Any = None

    def summarize(self, summary_data: Any, total: int, trainable: int, size: float, *args: Any, **kwargs: Any) -> None:
        type(self).made = summary_data, total, trainable, size, kwargs["total_flops"]


def rich_summary_with_an_example_input_in_bf16(run: Run) -> Any:
    module = Shown()
    module.example_input_array = module.example_input_array.bfloat16()
    run.trainer(Noted(), enable_model_summary=True, precision="bf16-true", max_steps=0).fit(
        module, *(make() for make in LOADERS)
    )
    return OnRankZero(Noted.made)


suite = Suite(
    ema, ema_of_buffers, plain_average_without_buffers, ema_resumed, stochastic_weight_averaging,
    stochastic_weight_averaging_of_batch_norm, stochastic_weight_averaging_resumed, finetuning, backbone_finetuning,
    summary_of_the_whole_model, summary_with_an_example_input, rich_summary_with_an_example_input_in_bf16,
)  # fmt: skip


@suite.for_each_strategy
def test_as_in_one_process(entry, scenario, tmp_path):
    suite.check(entry, scenario, tmp_path)


class Unlike(UnfreezesByTurns):
    """Unfreezes other layers on other ranks."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            layers = pl_module.backbone[4:] if pl_module.trainer.is_global_zero else pl_module.backbone[2:]
            self.unfreeze_and_add_param_group(layers, optimizer)


def test_groups_that_differ_between_ranks_are_refused():
    case = Case(Backbone, row_loader, trainer={"max_epochs": 2, "callbacks": lambda: [Unlike()]})
    text = "The ranks added different parameters to group 1 of SGD (rank 1 unlike rank 0). Add the same on every rank;"
    assert text in failure_of(case)


@pytest.mark.parametrize("callback", [UnfreezesByTurns, lambda: EMAWeightAveraging(decay=0.5)])
def test_sharded_checkpoints_of_such_callbacks_are_refused(callback):
    options = {"max_epochs": 2, "callbacks": lambda: [callback()]}
    case = Case(Backbone, row_loader, {"state_dict_type": "sharded"}, options)
    text = (
        'PipelineStrategy(state_dict_type="sharded") saves what each rank holds, but a callback that averages weights'
        ' or finetunes saves weights or groups of its own, which are gathered. Use state_dict_type="full".'
    )
    assert text in failure_of(case)
