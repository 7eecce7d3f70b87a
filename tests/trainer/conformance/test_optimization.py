"""Between the backward and the optimizer: clipping, accumulation, groups and the hooks one may override there.

The whole range of accumulation and clipping under the pipeline is in ``test_parity.py``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from tests.trainer.conformance.runs import Run, Suite, core
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader

RAGGED = (8, 5, 8, 3, 8)


def fit(run: Run, module: Classifier, **options: Any) -> int:
    trainer = run.trainer(**{"max_epochs": 2, **options})
    trainer.fit(module, row_loader(RAGGED), row_loader((5,)))
    return trainer.global_step


@core
def clipped_by_norm_and_accumulated(run: Run) -> Any:
    return fit(run, Classifier(), gradient_clip_val=0.05, accumulate_grad_batches=2)


def clipped_by_value(run: Run) -> Any:
    return fit(run, Classifier(), gradient_clip_val=0.01, gradient_clip_algorithm="value")


class Warmup(Classifier):
    """Steps by itself: a warmup of the learning rate, then the step with its closure."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 5)
        optimizer.step(closure=closure)


@core
def an_optimizer_step_of_ones_own(run: Run) -> Any:
    return fit(run, Warmup()), fit(run, Warmup(), accumulate_grad_batches=2)


class SkipsSteps(Classifier):
    """Runs the closure every time and the optimizer every other time."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=closure)
        else:
            closure()


def an_optimizer_step_that_skips(run: Run) -> Any:
    return fit(run, SkipsSteps())


class Zeroes(Classifier):
    """Keeps its gradients over two batches, and zeroes in place."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)


def zero_grad_of_ones_own(run: Run) -> Any:
    return fit(run, Zeroes())


class Clips(Classifier):
    """Clips by itself, in other ways from one epoch to the next."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        value, algorithm = (0.02, "norm") if self.current_epoch == 0 else (0.005, "value")
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)


def clipping_of_ones_own(run: Run) -> Any:
    return fit(run, Clips())


class Scales(Classifier):
    """Changes gradients in hooks, each parameter by itself."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before_backward", loss.detach())

    def on_after_backward(self) -> None:
        for parameter in self.net[0].parameters():
            if parameter.grad is not None and not isinstance(parameter, ForeignParameter):
                parameter.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("lr", optimizer.param_groups[0]["lr"])


def gradients_changed_in_hooks(run: Run) -> Any:
    return fit(run, Scales())


class Groups(Classifier):
    """Groups of which a stage owns none, some or all; without weight decay on biases."""

    def configure_optimizers(self) -> Any:
        biases = [p for n, p in self.named_parameters() if n.endswith("bias") and not n.startswith("net.0")]
        others = [p for n, p in self.named_parameters() if not n.endswith("bias") and not n.startswith("net.14")]
        return torch.optim.AdamW(
            [{"params": self.net[0].bias, "lr": 0.05}, {"params": biases, "weight_decay": 0.0},
             {"params": others}, {"params": self.net[14].weight, "betas": (0.8, 0.9)}], lr=1e-2,
        )  # fmt: skip


@core
def groups_of_which_a_stage_owns_none(run: Run) -> Any:
    return fit(run, Groups())


class HeadOnly(Classifier):
    """Its optimizer holds the last layer, or the first."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[self.layer].parameters(), lr=1e-2)


@core
def an_optimizer_of_one_layer(run: Run) -> Any:
    return [fit(run, HeadOnly(layer), gradient_clip_val=0.1) for layer in (0, 14)]


class Frozen(Classifier):
    """Some layers do not train; from the second epoch on others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.net[:7].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[12].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def frozen_layers(run: Run) -> Any:
    return fit(run, Frozen(), max_epochs=3)


class LoRA(nn.Module):
    """A frozen layer and a product of two small matrices beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, layer.in_features) / 3)
        self.b = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


class Adapted(Classifier):
    """Trains adapters and nothing else."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(LoRA(nn.Linear(WIDTH, WIDTH)) for _ in range(5)), nn.Linear(WIDTH, CLASSES)))
        self.net[-1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.5, momentum=0.9)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.1)


@core
def adapters_on_a_frozen_model(run: Run) -> Any:
    return fit(run, Adapted(), gradient_clip_val=0.5)


suite = Suite(
    clipped_by_norm_and_accumulated, clipped_by_value, an_optimizer_step_of_ones_own, an_optimizer_step_that_skips,
    zero_grad_of_ones_own, clipping_of_ones_own, gradients_changed_in_hooks, groups_of_which_a_stage_owns_none,
    an_optimizer_of_one_layer, frozen_layers, adapters_on_a_frozen_model,
)  # fmt: skip


@suite.for_each_strategy
def test_as_in_one_process(entry, scenario, tmp_path):
    suite.check(entry, scenario, tmp_path)
