"""What a step does with values and parameters of other stages works, or is refused in words that name the remedy."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_parallel.demo import GPT, HuggingFaceLM
from tests.trainer.modules import CLASSES, WIDTH, Classifier, Mlp, row_loader, token_loader
from tests.trainer.pipelines import Case, assert_parity, failure_of, on_stages

CUT = {"blocks": ["fc1", "fc2", "fc3", "fc4"], "partition": "count"}


def case_of(make_module: Any, **options: Any) -> Case:
    return Case(make_module, row_loader, {**CUT, **options}, validate=False)


# -- refused in words --------------------------------------------------------------------------------------------------


class WritesIntoARealTensor(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        buffer = torch.zeros(len(x), 8)
        buffer[:] = self.fc1(x)
        return self.fc4(self.fc3(self.fc2(buffer)))


class AddsOfAllParameters(Mlp):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class SkipsToTheEnd(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        first = self.fc1(x)
        return self.fc4(self.fc3(self.fc2(first)) + first)


class SkipsIntoTheLoss(Mlp):
    def loss(self, batch: Any) -> Tensor:
        first = self.fc1(batch[0])
        return F.cross_entropy(self.fc4(self.fc3(self.fc2(first))), batch[1]) + first.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class ReadsData(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc4(self.fc3(self.fc2(h * (2 if h.mean().item() > 0 else 1))))


class BranchesOnData(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc2(self.fc1(x))
        return self.fc4(self.fc3(-h if h.sum() > 0 else h))


class RegistersTheHeadFirst(Mlp):
    def __init__(self) -> None:
        super().__init__()
        head = self.fc4
        del self.fc4
        for name in ("fc1", "fc2", "fc3"):
            layer = self._modules.pop(name)
            if name == "fc1":
                self.fc4 = head
            setattr(self, name, layer)


class LeavesABlockOut(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(self.fc2(self.fc1(x)), (0, CLASSES - 8))


class LogsAnEarlyValue(Mlp):
    def loss(self, batch: Any) -> Tensor:
        first = self.fc1(batch[0])
        self.log("first", first.mean())
        return F.cross_entropy(self.fc4(self.fc3(self.fc2(first))), batch[1])


class Reentrant(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc2(self.fc1(x))
        return self.fc4(checkpoint(self.fc3, h, use_reentrant=True))


class Encoder(nn.Sequential):
    """A block whose work has a method of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)

    def encode(self, x: Tensor) -> Tensor:
        return self[0](x).relu()


class CallsAMethod(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc3 = Encoder(self.fc1), Encoder(self.fc3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc4(self.fc3(self.fc2(self.fc1.encode(x))))


class CallsAMethodOfALaterStage(CallsAMethod):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc4(self.fc3.encode(self.fc2(self.fc1(x))))


class CallsForward(CallsAMethod):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc4(self.fc3(self.fc2(self.fc1.forward(x))))


class CallsAPart(CallsAMethod):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc4(self.fc3(self.fc2(self.fc1[0](x))))


class ReturnsNoNumber(Mlp):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


REFUSED = [
    (
        WritesIntoARealTensor,
        "The step reads the output of `fc1` (stage 0), whose data this stage does not hold: `aten.copy_",
    ),
    (WritesIntoARealTensor, "writes it into a real tensor of shape (2, 8). Pass the value through the blocks"),
    (
        AddsOfAllParameters,
        "uses parameter `fc1.weight` of stage 0, which this stage does not hold: `pow` uses it outside",
    ),
    (
        AddsOfAllParameters,
        "Compute such a term from a module's own forward, tie the parameter to a module of this stage",
    ),
    (
        SkipsToTheEnd,
        "passes to `fc4` (stage 1) a value computed from the output of `fc1` (stage 0), whose data stage 1",
    ),
    (
        SkipsIntoTheLoss,
        "The step returns a value computed from the output of `fc1` (stage 0), whose data stage 1 does not",
    ),
    (
        ReadsData,
        "The step reads the output of `fc1` (stage 0), whose data this stage does not hold: `item` reads its data.",
    ),
    (
        BranchesOnData,
        "The step reads the output of `fc2` (stage 0), whose data this stage does not hold: `bool` reads its",
    ),
    (LeavesABlockOut, "The step ended on stage 0 without calling `fc3`, the first block of stage 1."),
    (
        LogsAnEarlyValue,
        "self.log('first') logs a value computed from the output of `fc1` (stage 0), which the loss stage",
    ),
    (
        Reentrant,
        "is called without gradients inside a training step, as reentrant activation checkpointing does. Use torch",
    ),
    (
        CallsAMethod,
        "The step calls `fc1.encode` itself, not `fc1`, and so uses parameter `fc1.0.weight` of stage 0, which",
    ),
    (
        CallsAMethod,
        "Stages follow calls of whole modules alone: call the module, and let its forward do what you need of it",
    ),
    (CallsAMethodOfALaterStage, "The step calls `fc3.encode` itself, not `fc3`, and so uses parameter `fc3.0.weight`"),
    (CallsForward, "The step calls `fc1.forward` itself, not `fc1`, and so uses parameter `fc1.0.weight` of stage 0"),
    (CallsAPart, "The step calls `fc1.0` itself, not the module around `fc1.0`, and so uses parameter `fc1.0.weight`"),
    (
        ReturnsNoNumber,
        "training_step returned a tensor of shape (2,) as its loss for a micro-batch; a pipeline needs one number",
    ),
]


@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")  # torch, of reentrant checkpointing
@pytest.mark.parametrize(("make_module", "text"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused(make_module, text: str):
    assert text in failure_of(case_of(make_module))


def test_a_module_registered_out_of_order_is_refused_and_can_be_moved():
    case = Case(RegistersTheHeadFirst, row_loader, {"blocks": ["fc1", "fc2", "fc3"]}, validate=False)
    message = failure_of(case)
    assert "`fc4`" in message and "Register modules in the order in which they run, or move it with stages={" in message
    assert_parity(case.but({"stages": {"fc4": -1}}), stages=(2, 3))


class ReadsANeighboursValue(Mlp):
    """The third block reads what the first returned and the second block took: stage 1 can hand it on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc3 = nn.Bilinear(8, 8, 8)

    def between(self, first: Tensor) -> Tensor:
        return first

    def forward(self, x: Tensor) -> Tensor:
        first = self.fc1(x)
        return self.fc4(self.fc3(self.fc2(self.between(first)), first))


class SkipsOverAStage(ReadsANeighboursValue):
    """The second block takes something computed from it; stage 1 never sees the value itself."""

    def between(self, first: Tensor) -> Tensor:
        return F.relu(first)


def test_a_value_of_a_stage_that_is_no_neighbour_is_refused():
    message = failure_of(case_of(SkipsOverAStage), 4)
    assert (
        "Block `fc3` of stage 2 needs a value computed from the output of `fc1` (stage 0), which stage 1 does"
        in message
    )
    assert "Pass the value through every block between" in message


# -- allowed, and equal to one process ---------------------------------------------------------------------------------


class WithMemory(nn.Module):
    """A block that hands on a second value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.layer(h)) + first, first


class PassesThrough(Classifier):
    """The remedy that the messages name: the value goes through every block."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(WithMemory() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.start(x)
        for block in self.blocks:
            h, first = block(h, first)
        return self.head(h + first)


class UsesShapes(Mlp):
    """Masks, positions and views made from the shape of what another stage returned."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        mask = torch.ones(h.shape[1], h.shape[1], device=h.device).tril()
        h = self.fc2(h) @ mask
        h = h.view(len(h), 2, -1).transpose(1, 2).reshape(h.shape)
        h = h.masked_fill(torch.arange(h.size(-1)) > 6, 0.0) + torch.zeros_like(h)
        return self.fc4(F.relu(self.fc3(h), inplace=True))


class CatchesEverything(Mlp):
    """A step's own error handling does not get in the way of the cut."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception as error:
            raise AssertionError("nothing goes wrong here") from error


class InEvaluationToo(Mlp):
    """A frozen first stage, whose output needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.requires_grad_(False)
        self.fc2.requires_grad_(False)


class CallsTwice(Mlp):
    """All blocks but the last, on two views of a row."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc3(self.fc2(self.fc1(x)))
        return self.fc4(h + self.fc3(self.fc2(self.fc1(-x))))


@pytest.mark.parametrize(
    "make_module", [PassesThrough, ReadsANeighboursValue, UsesShapes, CatchesEverything, InEvaluationToo, CallsTwice]
)
def test_allowed(make_module):
    case = Case(make_module, row_loader, {} if make_module is PassesThrough else CUT)
    assert_parity(case)


class Recomputes(GPT):
    """Non-reentrant activation checkpointing, called by the user's forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        return self.head(self.norm(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Keeps(GPT):
    """The same without recomputation."""

    configure_optimizers = Recomputes.configure_optimizers


GPT_SIZE = {"vocabulary": 11, "context": 16, "width": 16, "num_heads": 2, "num_blocks": 4}


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "1f1b"])
def test_recomputation_with_several_micro_batches_in_flight(schedule: str):
    assert_parity(Case(lambda: Recomputes(**GPT_SIZE), token_loader, {"schedule": schedule}))


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_recomputation_draws_the_same_dropout(num_stages: int):
    kept, recomputed = (
        on_stages(Case(lambda make=make: make(**GPT_SIZE, dropout=0.5), token_loader), num_stages)[0]
        for make in (Keeps, Recomputes)
    )
    assert torch.equal(torch.stack(kept.losses), torch.stack(recomputed.losses))
    assert all(torch.equal(kept.weights[name], value) for name, value in recomputed.weights.items())


RENAMED = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # transformers 5


class RecomputingHuggingFace(HuggingFaceLM):
    def __init__(self, architecture: Any, reentrant: bool = False) -> None:
        super().__init__(architecture, vocabulary=11, context=16, width=16, num_heads=2)
        self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@RENAMED
@pytest.mark.parametrize(
    "reentrant", [pytest.param(False, marks=pytest.mark.slow), True]
)  # inside a block even reentrant checkpointing is the block's own matter
@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_gradient_checkpointing_of_transformers(architecture: str, reentrant: bool):
    case = Case(lambda: RecomputingHuggingFace(architecture, reentrant), token_loader)
    assert_parity(case)
