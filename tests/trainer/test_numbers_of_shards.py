"""Numbers that hooks read off parameters and gradients which ranks divide: the whole's, or a sentence."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_parallel import HybridStrategy, ZeROStrategy
from tests.trainer.modules import Classifier
from tests.trainer.pipelines import LOSS
from tests.trainer.zeros import Fit, fit, on_ranks

OPTIONS: dict[str, Any] = {"max_steps": 2, "use_distributed_sampler": False, "limit_val_batches": 0}


def numbers(module: nn.Module) -> list[float]:
    found: list[float] = []
    for p in module.parameters():
        for x in (p.detach(), p.grad):
            found += [float(x.norm()), x.sum().item(), float(x.abs().max()), x.pow(2).sum().sqrt().item()]
            found += [x.mean().item(), x.norm(1).item(), float(x.norm(float("inf"))), float(bool((x != 0).any()))]
    return found


class Reads(Classifier):
    """Reads and logs numbers of its parameters and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += numbers(self)
        norms = grad_norm(self, 2)
        self.seen += [float(value) for value in norms.values()]
        self.log_dict({f"logged_{key}": value for key, value in norms.items()})
        self.seen.append(float(f"{self.net[0].weight.detach().norm():.6f}"))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("weight_norm", sum(p.detach().pow(2).sum() for p in self.parameters()).sqrt())


@pytest.mark.parametrize("make", [
    lambda: ZeROStrategy(stage=3),
    pytest.param(lambda: ZeROStrategy(stage=2, engine="fsdp2"), marks=pytest.mark.slow),
    pytest.param(lambda: ZeROStrategy(stage=2, engine="fsdp2", shard_size=1), marks=pytest.mark.slow),
])  # fmt: skip
def test_numbers_are_those_of_one_process(make: Any):
    run = Fit(Reads, OPTIONS, after=lambda trainer, module: module.seen)
    reference = fit(run, "auto", 1)
    first, second = on_ranks([(run, make)], 2)[0]
    torch.testing.assert_close(torch.tensor(first.extra), torch.tensor(reference.extra), **LOSS)
    assert second.extra == first.extra
    torch.testing.assert_close(first.metrics, reference.metrics, **LOSS, check_dtype=False)


class Converts(Classifier):
    """Converts a parameter that is freed."""

    convert: Any

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        type(self).convert(self.net[0].weight)


CONVERSIONS = {
    "double": lambda p: p.double().norm(),
    "to": lambda p: p.to(torch.float64),
    "type": lambda p: p.type(torch.float64),
    "bfloat16": lambda p: p.bfloat16(),
    "float, copied": lambda p: p.to("cpu", copy=True),
    "module": lambda p: nn.ParameterList([p]).double(),
}


@pytest.mark.parametrize("name", ["double", *(pytest.param(n, marks=pytest.mark.slow) for n in list(CONVERSIONS)[1:])])
def test_a_freed_parameter_is_not_converted(name: str):
    make = type("Converts", (Converts,), {"convert": staticmethod(CONVERSIONS[name])})
    with pytest.raises(
        Exception, match=r"reads parameter `net\.0\.weight`, of which zero_stage=3 leaves this rank a part"
    ):
        on_ranks([(Fit(make, OPTIONS), lambda: HybridStrategy(zero_stage=3))], 2)


class ConvertsInside(Classifier):
    """The remedy."""

    found: Any = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.whole_parameters() if self.trainer.world_size > 1 else torch.no_grad():
            self.found = float(self.net[0].weight.detach().double().norm())


@pytest.mark.slow
def test_the_remedy_reads_it():
    run = Fit(ConvertsInside, OPTIONS, after=lambda trainer, module: module.found)
    reference = fit(run, "auto", 1)
    [results] = on_ranks([(run, lambda: HybridStrategy(zero_stage=3))], 2)
    assert results[0].extra == pytest.approx(reference.extra)
