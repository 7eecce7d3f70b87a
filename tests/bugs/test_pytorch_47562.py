"""Forces, gradient penalties and physics-informed losses: derivatives inside a step. A walk through a graph that ends
where another process or a freed weight begins trained on zero for who said allow_unused, or ended in words of storages.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel import HybridStrategy, PipelineStrategy, ZeROStrategy
from tests.trainer.modules import Classifier
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import Fit, fit, on_ranks

OPTIONS: dict[str, Any] = {"max_steps": 3, "use_distributed_sampler": False, "limit_val_batches": 0}


class Forces(Classifier):
    """The loss is of a derivative by the input."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].detach().requires_grad_()
        energy = self.net(x)
        return (self.force(energy, x) + 1).pow(2).mean() + energy.pow(2).mean()

    def force(self, energy: Tensor, x: Tensor) -> Tensor:
        options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
        return torch.autograd.grad(energy.sum(), x, **options)[0]


class Plainly(Forces):
    def force(self, energy: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class Attacks(Forces):
    """A first-order derivative, which a step reads off the input."""

    def force(self, energy: Tensor, x: Tensor) -> Tensor:
        energy.sum().backward(retain_graph=True)
        return x.grad.sign() if x.grad is not None else torch.zeros_like(x)


class Functional(Forces):
    def force(self, energy: Tensor, x: Tensor) -> Tensor:
        return torch.func.vjp(self.net, x)[1](torch.ones_like(energy))[0]


class Forwards(Forces):
    """A tangent in place of a gradient."""

    def force(self, energy: Tensor, x: Tensor) -> Tensor:
        return torch.func.jvp(self.net, (x,), (torch.ones_like(x),))[1]


class Penalty(Forces):
    """The penalty of R1 and WGAN-GP: the critic is called again, on other rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = (batch[0] + 0.1).detach().requires_grad_()
        slope = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]
        return self.loss(batch) + slope.square().sum(1).mean()


class Slopes(Forces):
    """A penalty on the gradients of all parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + 0.1 * torch.stack([gradient.norm() for gradient in gradients]).norm()


KINDS = [Forces, Plainly, Attacks, Functional, Forwards, Penalty, Slopes]
SLOW = [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
WORDS = (
    'ZeROStrategy(stage=1) or stage=2 and HybridStrategy(zero_stage=3, gather="step") without a pipeline axis run such'
    " steps"
)
BACKWARD = "The step calls backward itself"


def deepspeed(stage: int) -> Any:
    pytest.importorskip("deepspeed")
    return ZeROStrategy(stage=stage, engine="deepspeed")


REFUSE = {
    "pipeline": lambda: PipelineStrategy(num_microbatches=2),
    "pipeline, stage recomputed": lambda: PipelineStrategy(num_microbatches=2, recompute="stage"),
    "zero_3": lambda: ZeROStrategy(stage=3),
    "zero_2 by fsdp2": lambda: ZeROStrategy(stage=2, engine="fsdp2"),
    "hybrid 3 by block": lambda: HybridStrategy(zero_stage=3, gather="microbatch"),
    "deepspeed 3": lambda: deepspeed(3),
}
CHEAP = ("pipeline", "zero_3")
RUN = [
    lambda: ZeROStrategy(stage=1), lambda: ZeROStrategy(stage=2, bucket_mb=1e-4), lambda: HybridStrategy(zero_stage=3)
]  # fmt: skip


@pytest.mark.parametrize("kind", SLOW)
@pytest.mark.parametrize("name", [n if n in CHEAP else pytest.param(n, marks=pytest.mark.slow) for n in REFUSE])
def test_refused_where_it_would_not_see_the_model(name: str, kind: type[Forces]):
    with pytest.raises(Exception) as caught:
        on_ranks([(Fit(kind, OPTIONS), REFUSE[name])], 2)
    words = BACKWARD if kind is Attacks and name.startswith(("hybrid", "pipeline")) else WORDS
    assert words in str(caught.value), caught.value


@pytest.mark.parametrize("kind", SLOW)
def test_as_in_one_process_where_it_is_said_to_run(kind: type[Forces]):
    reference = fit(Fit(kind, OPTIONS), "auto", 1)
    makes = RUN[:2] if kind is Attacks else RUN
    for results in on_ranks([(Fit(kind, OPTIONS), make) for make in makes], 2, timeout=58.0):
        torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
        torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)


def test_a_penalty_on_gradients_of_other_stages_is_not_told_of_weight_decay():
    with pytest.raises(Exception, match=re.escape(WORDS)) as caught:
        on_ranks([(Fit(Slopes, OPTIONS), REFUSE["pipeline"])], 2)
    assert "a derivative by parameter `net.0.weight` of stage 0" in str(caught.value)
    assert "weight_decay" not in str(caught.value)
    reference = fit(Fit(Slopes, OPTIONS), "auto", 1)
    for results in on_ranks([(Fit(Slopes, OPTIONS), make) for make in RUN[:2]], 2):
        torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
        torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)


@pytest.mark.slow
def test_a_backward_in_a_step_is_none_of_the_step_s_own():
    with pytest.raises(Exception, match=r"The step calls backward itself.*ZeROStrategy\(stage=1\) or stage=2 run it"):
        on_ranks([(Fit(Attacks, OPTIONS), RUN[2])], 2)


class InTheBlock(torch.nn.Module):
    """A block that takes a derivative of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            slope = torch.autograd.grad(torch.tanh(self.layer(z)).sum(), z, create_graph=True)[0]
        return y + 0.1 * slope


class Blocks(Classifier):
    def __init__(self) -> None:
        super().__init__(torch.nn.Sequential(*(InTheBlock(6) for _ in range(4))))

    def loss(self, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0])[:, :3], batch[1])


class AtTheEnd(Classifier):
    """The last stage derives by what it computed itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        energy = logits.square().sum(1)
        slope = torch.autograd.grad(energy.sum(), logits, create_graph=True)[0]
        return slope.square().mean() + self.loss_of(logits, batch[1])

    def loss_of(self, logits: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, y)


@pytest.mark.parametrize("kind", [Blocks, pytest.param(AtTheEnd, marks=pytest.mark.slow)])
def test_a_pipeline_runs_what_one_stage_holds(kind: type[Classifier]):
    reference = fit(Fit(kind, OPTIONS), "auto", 1)
    make = lambda: PipelineStrategy(num_microbatches=2, check_loss=kind is Blocks)  # noqa: E731
    [results] = on_ranks([(Fit(kind, OPTIONS), make)], 2)
    torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
    torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
