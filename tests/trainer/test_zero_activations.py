"""Checkpointed blocks under every engine: losses and weights as without, and fewer bytes of activations."""

import importlib.util
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel.callbacks import MemoryMonitor
from lightning_parallel.strategies import ZeROStrategy
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_dataset
from tests.trainer.zeros import Fit, on_ranks, zero

BLOCKS = 6


class Deep(Classifier):
    """Blocks of several layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, WIDTH)) for _ in range(BLOCKS)
        ]
        self.net = nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


def activations(trainer: Any, module: LightningModule) -> Any:
    own = [name for name, part in module.named_modules() if "forward" in vars(part)]
    return float(trainer.callback_metrics["parallel/memory_activations_peak/rank_0"]), own


def run() -> Fit:
    options = {"max_epochs": 1, "callbacks": lambda: [MemoryMonitor(1)], "limit_val_batches": 0}
    return Fit(Deep, options, lambda: row_dataset(40, 4), activations)


ENGINES = [
    pytest.param(1, "native", marks=pytest.mark.slow),
    (2, "native"),
    (3, "fsdp2"),
    *(pytest.param(stage, "deepspeed", marks=pytest.mark.slow) for stage in (2, 3)),
]


@pytest.mark.parametrize(("stage", "engine"), ENGINES)
def test_blocks_are_computed_again(stage: int, engine: str):
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    kinds: list[dict[str, Any]] = [
        {},
        {"activation_checkpointing": True},
        {"activation_checkpointing": "net", "offload_checkpoints": True},
    ]
    plain, *others = on_ranks([(run(), zero(stage, engine=engine, **kind)) for kind in kinds], 2)
    bytes_held = [results[0].extra[0] for results in (plain, *others)]
    for results in others:
        torch.testing.assert_close(results[0].losses, plain[0].losses, rtol=0.0, atol=0.0)
        torch.testing.assert_close(results[0].weights, plain[0].weights, rtol=0.0, atol=0.0)
        assert results[0].extra[1] == []  # blocks are given back
    assert bytes_held[1] < bytes_held[0] / 3 and bytes_held[2] < bytes_held[1]


class Normed(Classifier):
    """Norms that keep running statistics inside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(2)]
        self.net = nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


@pytest.mark.parametrize(("stage", "engine"), ENGINES)
def test_a_batch_is_counted_once_by_norms(stage: int, engine: str):
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    job = Fit(Normed, {"max_epochs": 1, "limit_val_batches": 0}, lambda: row_dataset(40, 4))
    plain, again = on_ranks([(job, zero(stage, engine=engine, activation_checkpointing=on)) for on in (False, True)], 2)
    assert plain[0].weights["net.0.1.num_batches_tracked"] == 5
    assert again[0].weights.keys() == plain[0].weights.keys()
    torch.testing.assert_close(again[0].weights, plain[0].weights, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"activation_checkpointing": 1}, "activation_checkpointing is True, False, a name or names."),
        ({"offload_checkpoints": True}, "offload_checkpoints is True or False, and False without activation_check"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], text: str):
    with pytest.raises(ValueError) as caught:
        ZeROStrategy(**arguments)
    assert text in str(caught.value)
