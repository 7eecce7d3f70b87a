"""In bf16 clipping was lost, the more so with a fused optimizer (Lightning 21435)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel.zero.gradient import ShardedGradient
from tests.trainer.modules import Classifier
from tests.trainer.zeros import Fit, on_ranks, zero

LIMIT = 0.1


class Clipped(Classifier):
    """Notes the norm of this rank's gradients as the optimizer takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return 10 * super().loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        grads = [p.grad for p in self.parameters()]
        local = [g.local if isinstance(g, ShardedGradient) else g.to_local() for g in grads]
        self.norms.append(float(torch.stack([g.double().square().sum() for g in local]).sum()))


def norms(trainer: Any, module: Any) -> Any:
    return module.norms, {segment.dtype for segment in trainer.optimizers[0].state}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_norm_is_at_most_the_limit(precision: str):
    options = {"max_steps": 3, "precision": precision, "gradient_clip_val": LIMIT}
    jobs = [(Fit(Clipped, options, after=norms), zero(stage)) for stage in (1, 2, 3)]
    for results in on_ranks(jobs, 2):
        (first, kinds), (second, _) = (result.extra for result in results)
        for a, b in zip(first, second, strict=True):
            assert 0.9 * LIMIT < (a + b) ** 0.5 <= LIMIT * (1 + 2**-9)  # a bf16 number is rounded by as much
        assert kinds == {torch.float32}
