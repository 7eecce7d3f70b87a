"""Remedies that messages name are followed: what is refused, in which words, and that what the words name runs."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.strategies import HybridStrategy, PipelineStrategy, TensorParallelStrategy, ZeROStrategy
from tests.harness import free_port, rank_outcomes, run_ranks
from tests.trainer.modules import CLASSES, WIDTH, Classifier, chain, row_loader
from tests.trainer.pipelines import join_as_torchrun, make_trainer
from tests.trainer.test_uncut_batches import Pretrained


class WithRprop(Classifier):
    """An optimizer that FSDP2 cannot run."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Rprop(self.parameters())


class Scripted(Classifier):
    """One block is a script."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions of PyTorch advise against scripts
            self.net[2] = torch.jit.script(self.net[2])


def trained(make: Any, strategy: Any, devices: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = make()
    trainer = make_trainer(strategy, devices, use_distributed_sampler=False)
    trainer.fit(module, row_loader(), row_loader())
    return {name: value.clone() for name, value in module.state_dict().items()}


CASES = [
    pytest.param(WithRprop, lambda: ZeROStrategy(stage=3), r"Use ZeROStrategy\(stage=2\), whose engine", id="rprop"),
    pytest.param(
        Scripted, lambda: ZeROStrategy(stage=3), r"`net\.2` is a module of torch\.jit\.script", id="script in zero_3"
    ),
    pytest.param(
        Scripted, lambda: PipelineStrategy(num_microbatches=2), r"or ZeROStrategy\(stage=2\), which runs scripts",
        id="script in a pipeline",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "strategy", "words"), CASES)
def test_what_is_refused_names_zero_2_which_runs_it(make: Any, strategy: Any, words: str):
    def refused(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        trained(make, strategy(), 2)

    def runs(rank: int, port: int) -> dict[str, Any]:
        join_as_torchrun(rank, 2, port)
        return trained(make, ZeROStrategy(stage=2), 2)

    with pytest.raises(ValueError, match=words):
        run_ranks(refused, 2, free_port(), group=False)
    expected = trained(make, "auto", 1)
    for weights in run_ranks(runs, 2, free_port(), group=False):
        torch.testing.assert_close(weights, expected)


def test_scripts_run_in_one_micro_batch_on_one_rank():
    expected = trained(Scripted, "auto", 1)
    torch.testing.assert_close(trained(Scripted, PipelineStrategy(num_microbatches=1), 1), expected)


class SavesInAHook(Classifier):
    """As people write the files of `transformers` in training."""

    def __init__(self, path: Path) -> None:
        super().__init__(Pretrained(*chain(4)))
        self.path, self.said = path, ""

    def on_train_batch_end(self, *_: Any) -> None:
        try:
            self.net.save_pretrained(self.path / "early.pt")
        except RuntimeError as error:
            self.said = str(error)


@pytest.mark.parametrize(
    "strategy",
    [lambda: ZeROStrategy(stage=3), pytest.param(lambda: HybridStrategy(zero_stage=3), marks=pytest.mark.slow)],
    ids=["zero_3", "hybrid"],
)
def test_shards_say_how_the_whole_model_is_saved_and_that_works(strategy: Any, tmp_path: Path):
    def run(rank: int, port: int) -> str:
        join_as_torchrun(rank, 2, port)
        module = SavesInAHook(tmp_path)
        trainer = make_trainer(strategy(), 2)
        trainer.fit(module, row_loader(), row_loader())
        assert "save_pretrained" not in vars(module.net)
        trainer.save_checkpoint(tmp_path / "whole.ckpt")
        if rank == 0:
            module.net.save_pretrained(tmp_path / "behind.pt")
        return module.said

    for said in run_ranks(run, 2, free_port(), group=False):
        assert "Call it behind fit, or trainer.save_checkpoint(path) on every rank" in said
    assert not (tmp_path / "early.pt").exists()
    module = SavesInAHook(tmp_path)
    module.load_state_dict(torch.load(tmp_path / "whole.ckpt")["state_dict"])
    module.net.save_pretrained(tmp_path / "loaded.pt")
    behind, loaded = torch.load(tmp_path / "behind.pt"), torch.load(tmp_path / "loaded.pt")
    assert len(loaded) == 8 and all(type(value) is torch.Tensor for value in behind.values())
    torch.testing.assert_close(behind, loaded, rtol=0.0, atol=0.0)


class Scale(nn.Module):
    """A layer with a buffer."""

    def __init__(self, on_meta: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        with torch.device("meta" if on_meta else "cpu"):
            self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Late(Classifier):
    """Layers of `configure_model`: parameters on meta, and buffers too or not."""

    def __init__(self, parameters: bool, buffers: bool) -> None:
        super().__init__(nn.Identity())
        self.meta = parameters, buffers

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            parameters, buffers = self.meta
            with torch.device("meta" if parameters else "cpu"):
                self.net = nn.Sequential(*(Scale(buffers) for _ in range(4)), nn.Linear(WIDTH, CLASSES))


@pytest.mark.parametrize(
    ("strategy", "runs"),
    [
        (lambda: PipelineStrategy(num_microbatches=2), (True, False)),
        pytest.param(lambda: HybridStrategy(zero_stage=3), (True, False), marks=pytest.mark.slow),
        (lambda: ZeROStrategy(stage=2), (False, False)),
        pytest.param(lambda: ZeROStrategy(stage=3), (False, False), marks=pytest.mark.slow),
    ],
    ids=["pipeline", "hybrid", "zero_2", "zero_3"],
)
def test_buffers_without_values_are_refused_and_layers_built_as_is_said_train(strategy: Any, runs: Any):
    def run(rank: int, port: int, made: tuple[bool, bool]) -> None:
        join_as_torchrun(rank, 2, port)
        trained(lambda: Late(*made), strategy(), 2)

    with pytest.raises(ValueError, match=r"Buffer `net\.0\.scale` .* Build the layers of configure_model"):
        run_ranks(lambda rank, port: run(rank, port, (True, True)), 2, free_port(), group=False)
    run_ranks(lambda rank, port: run(rank, port, runs), 2, free_port(), group=False)


class Two(Classifier):
    """Two classes, so that two ranks may cut the head."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*chain(4)[:-1], nn.Linear(WIDTH, 4)))


UP_DOWN = {"net.0": "colwise", "net.2": "rowwise"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("plan", "words", "fits"),
    [
        ({**UP_DOWN, "net.2": "colwise"}, r'`net\.2` is cut "colwise" .* Cut `net\.2` "rowwise"', UP_DOWN),
        pytest.param(
            {"net.2": "rowwise"}, r'`net\.2` is cut "rowwise" .* Cut what comes before it "colwise"',
            UP_DOWN, marks=SLOW,
        ),
        pytest.param(
            {**UP_DOWN, "net.4": "colwise"}, r'has to be cut "rowwise"',
            {**UP_DOWN, "net.4": "colwise", "net.6": "rowwise"}, marks=SLOW,
        ),
        pytest.param(
            {"net.6": "colwise"}, r'`net\.6`, the last linear module, .* Cut it "vocab"',
            {"net.6": "vocab"}, marks=SLOW,
        ),
    ],
    ids=["two colwise", "rowwise alone", "colwise alone", "head"],
)  # fmt: skip
def test_cuts_that_do_not_fit_each_other_name_those_that_do(plan: Any, words: str, fits: Any):
    def run(rank: int, port: int, plan: Any) -> dict[str, Any]:
        join_as_torchrun(rank, 2, port)
        torch.manual_seed(0)
        trainer = make_trainer(TensorParallelStrategy(tensor_plan=plan), 2)
        trainer.fit(Two(), row_loader(), row_loader())
        return {"loss": trainer.callback_metrics["val_loss"]}

    outcomes = rank_outcomes(lambda rank, port: run(rank, port, plan), 2, free_port(), group=False)
    said = [f"{outcome.text} {outcome.error}" for outcome in outcomes if outcome.error]
    assert said and all(re.search(words, text, re.DOTALL) for text in said)
    torch.manual_seed(0)
    trainer = make_trainer("auto", 1)
    trainer.fit(Two(), row_loader(), row_loader())
    for found in run_ranks(lambda rank, port: run(rank, port, fits), 2, free_port(), group=False):
        torch.testing.assert_close(found["loss"], trainer.callback_metrics["val_loss"])
