"""Remedies that messages name are followed: what is refused, in which words, and that what the words name runs."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_parallel.strategies import PipelineStrategy, ZeROStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import Classifier, chain, row_loader
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


def test_shards_say_how_the_whole_model_is_saved_and_that_works(tmp_path: Path):
    def run(rank: int, port: int) -> str:
        join_as_torchrun(rank, 2, port)
        module = SavesInAHook(tmp_path)
        trainer = make_trainer(ZeROStrategy(stage=3), 2)
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
