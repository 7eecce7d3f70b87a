"""Values that pass stages by: U-Nets, encoder-decoders, losses on features of the middle."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.pipeline.stage.boundary import SendBoundary
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import (
    Case,
    assert_parity,
    assert_same,
    failure_of,
    many_on_stages,
    on_stages,
    one_process,
)

SKIP = {"skip_connections": True}
BLOCKS = [f"down.{i}" for i in range(4)] + [f"up.{i}" for i in range(4)]


class UNet(Classifier):
    """Four blocks down, four up; block i up also takes what block 3 - i down returned."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = torch.tanh(block(torch.cat([x, skips.pop() * 0.5], dim=-1)))
        return self.head(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, scale: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.layer(x) + memory)
        return x if scale is None else x * scale


class EncoderDecoder(Classifier):
    """Every decoder block takes what the encoder made of the input."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.up = nn.ModuleList(Decoder() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.down:
            memory = block(memory)
        scale = torch.sigmoid(memory.mean(-1, keepdim=True))  # computed in the step from another stage's value
        h = torch.zeros_like(memory) + 0.1
        for block in self.up:
            h = block(h, memory, scale)
        return self.head(h)


class Auxiliary(UNet):
    """The loss also looks at features of every block, and the step logs one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = []
        for block in self.down:
            x = block(x)
            features.append(x)
        for block in self.up:
            x = torch.tanh(block(torch.cat([x, x], dim=-1)))
        loss = F.cross_entropy(self.head(x), y) + 0.1 * sum(feature.pow(2).mean() for feature in features)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("make_module", [UNet, EncoderDecoder, Auxiliary])
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_parity(make_module: Any, schedule: str):
    case = Case(make_module, lambda: row_loader((8, 6, 5)), {**SKIP, "blocks": BLOCKS, "schedule": schedule})
    assert_parity(case.but(trainer={"max_epochs": 2}), stages=(2, 4))


class TwoViews(UNet):
    """The model is called twice, and its first block once more behind that, for the loss alone."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss = super().loss(batch) + super().loss((-x, y))
        return loss + self.down[0](2 * x).square().mean()


def test_parity_where_the_model_is_called_twice():
    case = Case(TwoViews, row_loader, {**SKIP, "blocks": BLOCKS})
    reference = one_process(case)
    for records in many_on_stages([case, case.but({"recompute": "stage"})], 4):
        assert_same(records, reference)


@pytest.mark.parametrize("recompute", [pytest.param("block", marks=pytest.mark.slow), "stage"])
def test_parity_with_recomputation(recompute: str):
    case = Case(UNet, row_loader, {**SKIP, "blocks": BLOCKS, "recompute": recompute}, {"accumulate_grad_batches": 2})
    assert_parity(case, stages=(4,))


@pytest.mark.parametrize("make_module", [UNet, Auxiliary])
def test_without_the_option_it_is_refused_and_the_option_named(make_module: Any):
    assert "skip_connections=True" in failure_of(Case(make_module, row_loader, {"blocks": BLOCKS}), 4)


def sent(trainer: Any, module: Any) -> dict[int, list[Any]]:
    """What this stage sends in each micro-batch of a training step, and to which."""
    [executor] = trainer.strategy.pipeline.engine.executors.values()
    contracts = {
        b.target: next(iter(b._contracts.values())) for b in executor.boundaries() if isinstance(b, SendBoundary)
    }
    return {target: list(contract.needed) for target, contract in sorted(contracts.items())}


def test_only_what_is_needed_travels_straight_to_where_it_is_used():
    options = {**SKIP, "blocks": BLOCKS, "partition": [2, 2, 2, 2]}
    case = Case(UNet, row_loader, options, validate=False, at_end=sent)
    places = [record.extra for record in on_stages(case, 4)[::-1]]
    # Stages: down 0, 1 | down 2, 3 | up 0, 1 | up 2, 3. The next block's argument goes by position: stage 1 gets what
    # down.1 returned so; up.0's argument is a concatenation of what down.3 returned, which is made before it is sent.
    # That of up.2 is made where it is used, of what up.1 and down.1 returned; stage 1 uses down.1 before.
    assert places == [
        {1: [0], 3: [("down.0", 0)]}, {2: [0, ("down.2", 0)], 3: [("down.1", 0)]}, {3: [("up.1", 0)]}, {},
    ]  # fmt: skip


class WritesInto(UNet):
    """Writes into a value of another stage that is used again."""

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.down[0](x)
        for block in list(self.down)[1:]:
            x = block(x)
        skip = skip.mul_(2.0)
        for block in self.up:
            x = torch.tanh(block(torch.cat([x, skip], dim=-1)))
        return self.head(x)


class DrawsFrom(UNet):
    """Drops out of a value of another stage, in the step."""

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.down[0](x)
        for block in list(self.down)[1:]:
            x = block(x)
        skip = F.dropout(skip, 0.5, training=True)
        for block in self.up:
            x = torch.tanh(block(torch.cat([x, skip], dim=-1)))
        return self.head(x)


@pytest.mark.parametrize("make_module", [WritesInto, DrawsFrom])
def test_what_cannot_be_computed_again_is_refused(make_module: Any):
    message = failure_of(Case(make_module, row_loader, {**SKIP, "blocks": BLOCKS, "check_loss": False}), 4)
    assert "computed from the output of `down.0` (stage 0), whose data stage" in message


class WritesBetweenCalls(UNet):
    """Writes into a value of the first stage when the last one has used it, and before the model is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.first = h = self.down[0](x)
        for block in list(self.down)[1:]:
            h = block(h)
        for block in self.up:
            h = torch.tanh(block(torch.cat([h, self.first * 0.5], dim=-1)))
        return self.head(h)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        before = F.cross_entropy(self(x), y)
        self.first.mul_(0.5)
        return before + F.cross_entropy(self(-x), y)


def test_a_value_that_is_written_into_when_it_has_been_used_is_refused_in_training():
    case = Case(WritesBetweenCalls, row_loader, {**SKIP, "blocks": BLOCKS, "partition": [2, 2, 2, 2]})
    message = "The step writes into what `down.0` returned, which a later stage uses as it was before: stage 0 sends it"
    assert message in failure_of(case.but({"check_loss": False}), 4)


class ValidatesWithWrites(WritesBetweenCalls):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


def test_without_gradients_it_may_be_written_into():
    case = Case(ValidatesWithWrites, row_loader, {**SKIP, "blocks": BLOCKS, "partition": [2, 2, 2, 2]})
    assert_parity(case, stages=(4,))
