"""A compiled submodule left `_orig_mod` in the keys of checkpoints, and resuming from them failed."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from tests.trainer.modules import Classifier, row_dataset
from tests.trainer.zeros import EACH, OTHERS, STAGES, Fit, on_ranks, zero


class Compiles(Classifier):
    """Compiles its network where Lightning says one should; a backend that compiles nothing keeps the test quick."""

    def configure_model(self) -> None:
        self.net.compile(backend="eager")


def one_batch() -> Any:
    return row_dataset(8, 4)


def saves(path: Path) -> Any:
    def save(trainer: Any, module: LightningModule) -> Any:
        trainer.save_checkpoint(path)
        return path.exists()

    return save


COMPILED = [
    pytest.param(
        *one.values, id=one.id, marks=[*one.marks, *([pytest.mark.slow] if one.id in ("own-1", "own-2") else [])]
    )
    for one in EACH
    if one.id != "deepspeed-3"
]


@pytest.mark.parametrize("strategy", COMPILED)
def test_keys_are_clean_and_resume_works(tmp_path: Path, strategy: Any):
    path = tmp_path / "compiled.ckpt"
    plain = Fit(Classifier, {"max_epochs": 4}, one_batch)
    compiled = Fit(Compiles, {"max_epochs": 2}, one_batch, after=saves(path))
    reference, _ = on_ranks([(plain, strategy), (compiled, strategy)], 2)
    assert list(torch.load(path, weights_only=False)["state_dict"]) == list(Classifier().state_dict())
    [resumed] = on_ranks([(Fit(Compiles, {"max_epochs": 4}, one_batch, resume=path), strategy)], 2)
    torch.testing.assert_close(resumed[0].weights, reference[0].weights)


class Replaced(Classifier):
    """What is in its place is another module, whose state dict has a level more."""

    def configure_model(self) -> None:
        if not hasattr(self.net, "_orig_mod"):
            self.net = torch.compile(self.net, backend="eager")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("stage", "engine"), [*((stage, None) for stage in STAGES), *OTHERS[:-1]])
def test_a_compiled_module_that_is_assigned(tmp_path: Path, stage: int, engine: Any):
    make = partial(zero, stage, engine=engine)
    path, folder = tmp_path / "compiled.ckpt", tmp_path / "folder"
    plain = Fit(Classifier, {"max_epochs": 4}, one_batch)
    compiled = Fit(Replaced, {"max_epochs": 2}, one_batch, after=saves(path))
    sharded = Fit(Replaced, {"max_epochs": 2}, one_batch, after=saves(folder))
    jobs = [(plain, make()), (compiled, make()), (sharded, make(state_dict_type="sharded"))]
    reference, _, _ = on_ranks(jobs, 2, timeout=110.0)
    assert list(torch.load(path, weights_only=False)["state_dict"]) == list(Classifier().state_dict())
    later = [
        Fit(kind, {"max_epochs": 4}, one_batch, resume=saved)
        for saved in (path, folder)
        for kind in (Replaced, Classifier)
    ]
    for results in on_ranks([(run, make()) for run in later], 2, timeout=110.0):
        assert torch.equal(results[0].losses, reference[0].losses[2:])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not there")
@pytest.mark.parametrize("kind", [Compiles, Replaced])
def test_deepspeeds_stage_3_refuses_it(kind: Any):
    with pytest.raises(Exception, match="is compiled, and DeepSpeed's stage 3 gathers parameters in hooks"):
        on_ranks([(Fit(kind, {"max_epochs": 1}, one_batch), zero(3, engine="deepspeed"))], 2)
