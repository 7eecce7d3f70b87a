"""What a strategy does not do is refused in words, at setup or in the first step that does it; nothing hangs.

``REFUSED`` holds what is known to be refused by some strategy. A strategy of the table that refuses one names it with a
part of the message, in ``refuses``; the message has to say what is, what was needed, and what to do. A strategy that
does not name it has to run it as one process does.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_parallel.strategies import PipelineStrategy
from tests.trainer.conformance.runs import Run, assert_as_in_one_process, run_scenarios
from tests.trainer.conformance.strategies import SERVERS, STRATEGIES, Entry
from tests.trainer.modules import WIDTH, Classifier, row_loader


def fit(run: Run, module: LightningModule, **options: Any) -> None:
    run.trainer(**options).fit(module, row_loader(), row_loader((5,)))


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def manual_optimization(run: Run) -> Any:
    fit(run, Manual())


class OwnBackward(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


def overridden_backward(run: Run) -> Any:
    fit(run, OwnBackward())


class QuasiNewton(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def optimizer_that_runs_its_closure_again(run: Run) -> Any:
    fit(run, QuasiNewton())


class Iterates(Classifier):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def step_on_an_iterator(run: Run) -> Any:
    warnings.filterwarnings("ignore", message=".*dataloader_iter")
    fit(run, Iterates())


class Skips(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def step_that_returns_none(run: Run) -> Any:
    warnings.filterwarnings("ignore", message="`training_step` returned `None`")
    trainer = run.trainer()
    trainer.callbacks.clear()  # the record would ask for its loss
    trainer.fit(Skips(), row_loader(), row_loader((5,)))


class Norms(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


def norms_of_all_gradients(run: Run) -> Any:
    fit(run, Norms())


class ClipsItself(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def clipping_without_lightning(run: Run) -> Any:
    fit(run, ClipsItself())


class Penalty(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 1e-3 * sum(p.square().sum() for p in self.parameters())


def penalty_over_all_parameters(run: Run) -> Any:
    fit(run, Penalty())


class Sized(Classifier):
    batch_size = 2

    def train_dataloader(self) -> Any:
        return row_loader((self.batch_size,) * 3)

    val_dataloader = train_dataloader


def batch_size_finder(run: Run) -> Any:
    Tuner(run.trainer()).scale_batch_size(Sized(), max_trials=2)


class WithAnExample(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, WIDTH)


def graph_of_the_model(run: Run) -> Any:
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.trace.*` is deprecated")
    fit(run, WithAnExample(), logger=TensorBoardLogger(run.folder, log_graph=True))


class ReadsItsExample(WithAnExample):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[:15](x)
        return self.net[15:](hidden if bool(hidden.sum() > 0) else -hidden)


def summary_of_a_model_that_reads_data(run: Run) -> Any:
    fit(run, ReadsItsExample(), enable_model_summary=True)


REFUSED = [
    manual_optimization, overridden_backward, optimizer_that_runs_its_closure_again, step_on_an_iterator,
    step_that_returns_none, norms_of_all_gradients, clipping_without_lightning, penalty_over_all_parameters,
    batch_size_finder, graph_of_the_model, summary_of_a_model_that_reads_data,
]  # fmt: skip


@pytest.mark.parametrize("scenario", REFUSED, ids=lambda s: s.__name__)
@pytest.mark.parametrize("entry", [entry.case() for entry in STRATEGIES if not entry.core])
def test_refused_in_words_or_as_in_one_process(entry: Entry, scenario: Callable[[Run], Any], tmp_path):
    words = entry.refuses.get(scenario.__name__)
    if words is None:
        outcomes = run_scenarios([scenario], entry, tmp_path)
        assert_as_in_one_process(scenario, outcomes[scenario.__name__], tmp_path / "one")
        return
    with pytest.raises(Exception) as caught:
        run_scenarios([scenario], entry, tmp_path)
    assert words in str(caught.value)


@pytest.mark.slow
def test_sandblaster_runs_the_optimizer_that_runs_its_closure_again(tmp_path):
    """Ranks that others started, as torchrun does; both are given all rows, so a step's mean is one process's."""
    options = {"consistency": "sandblaster", "lease": 30.0}
    entry = Entry("parameter_server", 2, **{**SERVERS, "options": options, "refuses": {}})
    outcomes = run_scenarios([optimizer_that_runs_its_closure_again], entry, tmp_path)
    (found,) = outcomes.values()
    assert_as_in_one_process(optimizer_that_runs_its_closure_again, found, tmp_path / "one")


def test_the_table_is_whole():
    """Every strategy string of this library is in the table, and every refusal that the table names is tried."""
    ours = {name for name, entry in StrategyRegistry.items() if entry["strategy"].__module__.startswith("lightning_p")}
    ours.remove("pipeline_auto")  # takes one of the others, and needs an example_input_array: see test_many_stages.py
    ours.remove("pipeline_terapipe")  # runs causal language models: see test_token_slices.py
    assert ours == {entry.name for entry in STRATEGIES}
    known = {scenario.__name__ for scenario in REFUSED}
    assert all(entry.refuses.keys() <= known for entry in STRATEGIES)


# -- the other package of Lightning --------------------------------------------------------------------------------


def other_module() -> Any:
    other = pytest.importorskip("pytorch_lightning")
    return type("Other", (other.LightningModule,), {"training_step": lambda self, batch: None})()


def test_a_module_of_pytorch_lightning_is_refused():
    """Lightning tells the two packages apart before a strategy sees the module."""
    module = other_module()
    with pytest.raises(TypeError, match=r"`model` must be a `LightningModule`.*got `Other`"):
        Trainer(strategy=PipelineStrategy(), devices=2, accelerator="cpu", logger=False).fit(module)


def test_a_trainer_of_pytorch_lightning_refuses_the_strategy():
    other = pytest.importorskip("pytorch_lightning")
    for strategy in (PipelineStrategy(), "pipeline_1f1b"):
        with pytest.raises(ValueError, match="You selected an invalid strategy name"):
            other.Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False)
