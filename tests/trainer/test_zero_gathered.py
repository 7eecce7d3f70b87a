"""FSDP2's engine where a forward has no backward behind it, and where the user runs backwards: weights are never of
before a step, flags of `requires_grad` are those of now, and no parameter is passed by."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.trainer.modules import CLASSES, WIDTH, Classifier
from tests.trainer.zeros import Fit, ddp, on_ranks, zero


class LooksAgain(Classifier):
    """Its forward is called between backward and step, as one does to log what the model says of something."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.log("again", self(torch.ones(2, WIDTH)).sum())


class Layers(LightningModule):
    """Manual optimization of layers that are in a list, and a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        pairs = (nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(2))
        self.layers, self.head = nn.ModuleList(pairs), nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for first, second in self.layers:
            x = x + torch.tanh(second(torch.tanh(first(x))))
        loss, optimizer = F.cross_entropy(self.head(x), y), self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Gan(LightningModule):
    """Lightning's, the discriminator first: the generator's forward has no backward there."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        generates, judges = self.optimizers()
        with judges.toggle_model():
            loss = self.discriminator(self.generator(x).detach()).mean() - self.discriminator(x).mean()
            self._step(judges, loss)
        with generates.toggle_model():
            self._step(generates, -self.discriminator(self.generator(x)).mean())
        return loss

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]


class Scaled(Layers):
    """A parameter of the LightningModule's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("module", [LooksAgain, Layers, Gan])
def test_weights_are_those_of_ddp(module):
    run = Fit(module)
    jobs = [(run, ddp(find_unused_parameters=module is Gan)), *((run, zero(stage, engine="fsdp2")) for stage in (2, 3))]
    reference, *sharded = on_ranks(jobs, 2)
    for results in sharded:
        for name, value in reference[0].weights.items():
            torch.testing.assert_close(results[0].weights[name], value, rtol=1e-5, atol=1e-6)


class LooksBehindEvaluation(Classifier):
    """As averages by hand do, which come and go around it, and `MemoryMonitor`, which reads in `on_train_end`."""

    def __init__(self) -> None:
        super().__init__()
        self.divided: list[bool] = []

    def on_validation_epoch_end(self) -> None:
        self.divided += [isinstance(parameter, DTensor) for parameter in self.parameters()]

    on_train_end = on_validation_epoch_end


def test_what_an_evaluation_gathered_is_freed_behind_it():
    run = Fit(LooksBehindEvaluation, {"max_steps": -1, "max_epochs": 1}, after=lambda trainer, module: module.divided)
    [results] = on_ranks([(run, zero(2, engine="fsdp2"))], 2)
    assert all(len(result.extra) == 32 and all(result.extra) for result in results)


class Mixed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(1, 1), nn.Linear(1, 1).double()


class Sparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, sparse=True)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Mixed, r"gathers what Mixed holds at once, and its parameters are of torch.float32 and torch.float64\. Make"),
        (Sparse, "reduces dense gradients, and `table` makes sparse ones. Use sparse=False"),
    ],
)
def test_what_fsdp2_cannot_reduce_is_refused_at_set_up(module, words):
    with pytest.raises(ValueError, match=words):
        on_ranks([(Fit(module), zero(3))], 2)


def test_a_parameter_that_no_call_gathers_is_refused_with_manual_optimization():
    with pytest.raises(ValueError, match=r"and `scale` belongs to no module of Scaled that is\. Put it into a module"):
        on_ranks([(Fit(Scaled), zero(3))], 2)
