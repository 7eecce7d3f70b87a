"""What messages propose is done, many at once on two ranks, and gives one process's weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_parallel.strategies import HybridStrategy, PipelineStrategy, ZeROStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import WIDTH, Classifier, chain, row_loader
from tests.trainer.pipelines import join_as_torchrun, make_trainer


class Adagrad(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Scaled(Classifier):
    """A parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


class Embedded(Classifier):
    """An embedding with dense gradients, by the row's label."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Added(), *chain(4)))


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, WIDTH, sparse=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding((x[:, 0] > 0).long())


class Mixed(Classifier):
    """A layer in float64 among those in float32."""

    def __init__(self) -> None:
        super().__init__(chain(4))
        self.net[2].double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x.to(next((p.dtype for p in layer.parameters()), x.dtype)))
        return x


class Hooked(Classifier):
    """A hook that changes a gradient once it has accumulated."""

    def __init__(self) -> None:
        super().__init__()

        def halve(parameter: Tensor) -> None:
            parameter.grad.mul_(0.5)

        for parameter in self.net[0].parameters():
            parameter.register_post_accumulate_grad_hook(halve)


class Writes(Classifier):
    """Writes to weights between a step and its backward."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.net[0].bias.data = self.net[0].bias.detach() * 0.5


class Freezes(Classifier):
    """Freezes a layer when training has begun."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx < 1)


class AddsGroup(Classifier):
    """Gives its head to the optimizer in the second batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.optimizers().optimizer.add_param_group({"params": list(self.net[-1].parameters()), "lr": 0.05})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[:-1].parameters(), lr=0.1)


class ReadsGradients(Classifier):
    """Changes gradients by their values in a hook."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class Replaces(Classifier):
    """Puts another parameter, which does not train, in the place of one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.net[0].weight = nn.Parameter(self.net[0].weight.detach() * 0.5)


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__(chain(4, lambda: nn.BatchNorm1d(WIDTH)))


class Carries(Classifier):
    """Carries the hidden state of its recurrent layer from batch to batch."""

    def __init__(self) -> None:
        super().__init__(chain(4))
        self.rnn, self.hidden = nn.LSTM(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.net(x)
        out, hidden = self.rnn(x[None], self.hidden)
        self.hidden = tuple(state.detach() for state in hidden)
        return self.net(out[0])


class WritesInPlace(Classifier):
    """Layers that write into what they get."""

    def __init__(self) -> None:
        super().__init__(chain(4, lambda: nn.LeakyReLU(0.3, inplace=True)))


class Checkpointed(Classifier):
    """A checkpoint around each layer, and the first layer's weight is the second's."""

    def __init__(self) -> None:
        super().__init__(chain(4))
        self.net[2].weight = self.net[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class CallsBackward(Classifier):
    """A step that runs a backward of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].detach().requires_grad_()
        self.net(x).pow(2).mean().backward()
        return self.loss((x + 0.1 * x.grad, batch[1]))


class Reversed(Classifier):
    """Calls its layers in another order than it made them."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(reversed(chain(4))))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.net):
            x = layer(x)
        return x


class ClipsItself(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class LogsActivations(Classifier):
    """Logs a value of a layer in the middle."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        middle = self.net[:2](batch[0])
        loss = F.cross_entropy(self.net[2:](middle), batch[1])
        self.log("middle", middle.abs().mean())
        return loss


class Manual(Scaled):
    """A parameter of the module's own, with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@dataclass(frozen=True)
class Remedy:
    """Something a message proposes.

    Attributes:
        make: a module that was refused.
        strategy: what was proposed.
        trainer: options of the Trainer.
    """

    make: Callable[[], Classifier]
    strategy: Callable[[], Any]
    trainer: Mapping[str, Any] = field(default_factory=dict)


BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
REMEDIES = {
    "adagrad": Remedy(Adagrad, lambda: ZeROStrategy(stage=2, engine="native")),
    "no dimension": Remedy(Scaled, lambda: ZeROStrategy(stage=2, engine="native")),
    "dense embedding": Remedy(Embedded, lambda: ZeROStrategy(stage=2)),
    "dense embedding, stages": Remedy(Embedded, lambda: PipelineStrategy(num_microbatches=2)),
    "two dtypes": Remedy(Mixed, lambda: ZeROStrategy(stage=2, engine="native")),
    "clipped by value": Remedy(Classifier, lambda: ZeROStrategy(stage=2, engine="native"), BY_VALUE),
    "hooks of gradients": Remedy(Hooked, lambda: PipelineStrategy(num_microbatches=1)),
    "a write before a backward": Remedy(Writes, lambda: ZeROStrategy(stage=1)),
    "frozen in the run": Remedy(Freezes, lambda: ZeROStrategy(stage=2, engine="native")),
    "a group in the run": Remedy(AddsGroup, lambda: ZeROStrategy(stage=2, engine="native")),
    "gradients read": Remedy(ReadsGradients, lambda: ZeROStrategy(stage=2, engine="native")),
    "another parameter": Remedy(Replaces, lambda: ZeROStrategy(stage=2)),
    "norms": Remedy(Normed, lambda: PipelineStrategy(num_microbatches=1)),
    "norms of the batch": Remedy(
        Normed, lambda: PipelineStrategy(num_microbatches=2, batch_norm="batch", schedule="gpipe")
    ),
    "hooks of gradients, flat": Remedy(Hooked, lambda: ZeROStrategy(stage=2, engine="native")),
    "dense embedding, copies": Remedy(Embedded, lambda: HybridStrategy(data_parallel_size=2)),
    "carried state": Remedy(Carries, lambda: PipelineStrategy(num_microbatches=1, stages={"rnn": 0})),
    "blocks that write": Remedy(WritesInPlace, lambda: PipelineStrategy(num_microbatches=2, recompute="none")),
    "checkpoints around blocks": Remedy(Checkpointed, lambda: PipelineStrategy(num_microbatches=2)),
    "checkpoints of a shared weight": Remedy(Checkpointed, lambda: ZeROStrategy(stage=2)),
    "a backward in the step": Remedy(CallsBackward, lambda: ZeROStrategy(stage=1)),
    "a backward in the step, 2": Remedy(CallsBackward, lambda: ZeROStrategy(stage=2)),
    "another order": Remedy(
        Reversed, lambda: PipelineStrategy(num_microbatches=2, blocks=[f"net.{i}" for i in reversed(range(7))])
    ),
    "clipped in a hook": Remedy(ClipsItself, lambda: PipelineStrategy(num_microbatches=2)),
    "clipped by the Trainer": Remedy(
        Classifier, lambda: PipelineStrategy(num_microbatches=2), {"gradient_clip_val": 0.05}
    ),
    "a logged activation": Remedy(LogsActivations, lambda: PipelineStrategy(num_microbatches=2, skip_connections=True)),
    "a bare parameter": Remedy(Manual, lambda: ZeROStrategy(stage=2, engine="native")),
    "counted blocks": Remedy(Classifier, lambda: PipelineStrategy(num_microbatches=2, partition="count")),
}


def trained(remedy: Remedy, strategy: Any, devices: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = remedy.make()
    trainer = make_trainer(strategy, devices, use_distributed_sampler=False, **remedy.trainer)
    trainer.fit(module, row_loader(), row_loader())
    return {name: value.detach().clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


def test_remedies_give_one_process_s_weights():
    def run(rank: int, port: int) -> dict[str, Any]:
        join_as_torchrun(rank, 2, port)
        return {name: trained(remedy, remedy.strategy(), 2) for name, remedy in REMEDIES.items()}

    found = run_ranks(run, 2, free_port(), group=False)[0]
    for name, remedy in REMEDIES.items():
        expected = trained(remedy, "auto", 1)
        torch.testing.assert_close(
            found[name], expected, rtol=2e-5, atol=2e-6, msg=lambda text, of=name: f"{of}: {text}"
        )


def test_a_parameter_that_is_replaced_while_it_is_divided_is_refused():
    def run(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        trained(Remedy(Replaces, lambda: None), ZeROStrategy(stage=3), 2)

    with pytest.raises(ValueError, match=r"another parameter in the place of `weight` .* use ZeROStrategy\(stage=2\)"):
        run_ranks(run, 2, free_port(), group=False)
