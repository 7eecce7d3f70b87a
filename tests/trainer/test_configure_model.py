"""Modules that are built in `configure_model`: after a seed they have one process's weights, and what ranks trained
comes back to the process that started them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn

from lightning_parallel import HybridStrategy, ParameterServerStrategy, PipelineStrategy, ZeROStrategy
from tests.harness import run_ranks
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import LOSS, make_trainer
from tests.trainer.zeros import Fit, fit, on_ranks

OPTIONS: dict[str, Any] = {"max_steps": 2, "use_distributed_sampler": False, "limit_val_batches": 0}


class Late(Classifier):
    """Blocks with initial values of their own, drawn where the module is built."""

    def __init__(self) -> None:
        seed_everything(7, verbose=False)
        super().__init__(nn.Identity())
        self.built = False

    def configure_model(self) -> None:
        if self.built:
            return
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.apply(self.initialise)
        self.built = True

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))


STRATEGIES = {
    "pipeline": lambda: PipelineStrategy(num_microbatches=2),
    "hybrid 3": lambda: HybridStrategy(zero_stage=3),
    "hybrid 3 by block": lambda: HybridStrategy(zero_stage=3, gather="microbatch"),
    "zero_3": lambda: ZeROStrategy(stage=3),
    "hybrid 2": lambda: HybridStrategy(zero_stage=2),
}


@pytest.mark.parametrize("name", ["pipeline", *(pytest.param(n, marks=pytest.mark.slow) for n in list(STRATEGIES)[1:])])
def test_weights_are_drawn_as_in_one_process(name: str):
    run = Fit(Late, OPTIONS)
    reference = fit(run, "auto", 1)
    [results] = on_ranks([(run, STRATEGIES[name])], 2)
    torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
    torch.testing.assert_close(results[0].weights, reference.weights, **LOSS)


class NeedsSetup(Late):
    """What `configure_model` builds depends on what a hook of the ranks left."""

    def setup(self, stage: str) -> None:
        self.width = WIDTH

    def configure_model(self) -> None:
        assert self.width
        super().configure_model()


def as_a_notebook() -> None:
    """This process is no rank of anybody's."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)


FORKED = {
    "pipeline": lambda: PipelineStrategy(num_microbatches=2, start_method="fork"),
    "zero_1": lambda: ZeROStrategy(stage=1, start_method="fork"),
    "hybrid 3": lambda: HybridStrategy(zero_stage=3, start_method="fork"),
    "servers": lambda: ParameterServerStrategy(start_method="fork"),
}


@pytest.mark.parametrize(
    "name", ["zero_1", *(pytest.param(n, marks=pytest.mark.slow) for n in FORKED if n != "zero_1")]
)
def test_forked_ranks_give_a_late_module_its_weights(name: str, tmp_path: Path):
    def notebook(_: int) -> tuple[Any, Any]:
        as_a_notebook()
        module = Late()
        trainer = make_trainer(FORKED[name](), 2, **OPTIONS)
        trainer.fit(module, row_loader(), row_loader())
        with pytest.warns(UserWarning, match="writes weights alone"):
            trainer.save_checkpoint(tmp_path / "last.ckpt")
        return {k: v.clone() for k, v in module.state_dict().items()}, None

    [(weights, _)] = run_ranks(notebook, 1, group=False, timeout=50.0)
    reference = fit(Fit(Late, OPTIONS, row_loader), "auto", 1)
    torch.testing.assert_close(weights, reference.weights, **LOSS)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    torch.testing.assert_close(dict(saved), weights, rtol=0.0, atol=0.0)


@pytest.mark.slow
def test_what_cannot_be_built_here_is_said():
    def notebook(_: int) -> None:
        as_a_notebook()
        with pytest.warns(UserWarning, match=r"has no place for 10 of them.*configure_model raised AttributeError"):
            make_trainer(FORKED["zero_1"](), 2, **OPTIONS).fit(NeedsSetup(), row_loader(), row_loader())

    run_ranks(notebook, 1, group=False, timeout=50.0)
