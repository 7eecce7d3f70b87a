"""Complex weights beside real ones, clipped by the norm of all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import HybridStrategy, ZeROStrategy
from tests.trainer.modules import Classifier
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import Fit, fit, on_ranks

OPTIONS: dict[str, Any] = {
    "max_steps": 3, "use_distributed_sampler": False, "limit_val_batches": 0, "gradient_clip_val": 0.1,
}  # fmt: skip


class Complex(Classifier):
    """Reads norms and sums of its gradients where hooks may."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) * self.turn).abs()[:, :3]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += [self.turn.grad.norm(), self.turn.grad.sum()]


@pytest.mark.parametrize("make", [
    lambda: ZeROStrategy(stage=2), pytest.param(lambda: ZeROStrategy(stage=1), marks=pytest.mark.slow),
    pytest.param(lambda: HybridStrategy(zero_stage=1), marks=pytest.mark.slow),
    pytest.param(lambda: HybridStrategy(zero_stage=3), marks=pytest.mark.slow),
])  # fmt: skip
def test_clipped_by_the_norm_of_one_process(make: Any):
    run = Fit(Complex, OPTIONS, after=lambda trainer, module: torch.stack([x.to(torch.complex64) for x in module.seen]))
    reference = fit(run, "auto", 1)
    [results] = on_ranks([(run, make)], 2)
    torch.testing.assert_close(results[0].extra, reference.extra, **LOSS)
    torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
