"""Steps that call the model several times: R-Drop, SimCLR, a teacher, a discriminator; equal to one process."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel.demo import HuggingFaceLM
from tests.trainer.modules import CLASSES, WIDTH, Classifier, Mlp, chain, row_dataset, row_loader, rows, token_loader
from tests.trainer.pipelines import (
    BF16,
    WEIGHTS,
    Case,
    Record,
    assert_parity,
    assert_ranks_agree,
    assert_same,
    failure_of,
    many_on_stages,
    on_stages,
    one_process,
)

CUT = {"blocks": ["fc1", "fc2", "fc3", "fc4"], "partition": "count"}


class RDrop(Classifier):
    """Both runs of the model on a batch are right, and alike (Liang et al., arXiv 2106.14448)."""

    rate = 0.0

    def __init__(self) -> None:
        super().__init__(chain(6, lambda: nn.Dropout(self.rate)))

    def second(self, x: Tensor) -> Tensor:
        return self(-x)  # without dropout a second run on x is the first one

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        a, b = self(x), self.second(x)
        alike = F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")
        return F.cross_entropy(a, y) + F.cross_entropy(b, y) + alike


class SharedActivation(RDrop):
    """One module without parameters at several places of the chain, and some before all that have any."""

    def __init__(self) -> None:
        Classifier.__init__(self, nn.Identity())
        act = nn.Tanh()
        layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), act)]
        self.net = nn.Sequential(nn.Flatten(), nn.Softsign(), *layers, nn.Softsign(), nn.Linear(WIDTH, CLASSES))


class RDropDrops(RDrop):
    rate = 0.3

    def second(self, x: Tensor) -> Tensor:
        return self(x)


class Checkpointed(RDrop):
    """The user's own checkpointing, around one block or around two that may lie on two stages."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = list(self.net)
        for block in blocks[:5]:
            x = checkpoint(block, x, use_reentrant=False)
        for pair in zip(blocks[5::2], blocks[6::2], strict=False):
            x = checkpoint(nn.Sequential(*pair).forward, x, use_reentrant=False)
        return x


class CheckpointedDrops(Checkpointed):
    rate = 0.3

    def second(self, x: Tensor) -> Tensor:
        return self(x)


class SimCLR(Classifier):
    """Two views of a row are near each other, far from all other rows' (Chen et al., arXiv 2002.05709)."""

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        z = torch.cat([self(x), self(x.flip(-1) + 0.1)])
        similar = F.cosine_similarity(z[:, None], z[None], dim=-1) / 0.5
        similar = similar.masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
        return F.cross_entropy(similar, torch.arange(len(z)).roll(len(x)))


def normed() -> nn.Sequential:
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class NormedSimCLR(SimCLR):
    def __init__(self) -> None:
        super().__init__(normed())


class NormedTwice(Classifier):
    """A mean over rows, so that micro-batches may be compared with a plain loop."""

    def __init__(self) -> None:
        super().__init__(normed())

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y) + F.cross_entropy(self(2 * x), y)


class Halves(Classifier):
    """The first half of the chain is called twice, the second half once, on the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net[8:](self.net[:8](x) + 0.5 * self.net[:8](x.flip(-1)))


class Taught(Classifier):
    """Learns from what the model itself says of clean rows, without gradients; logs and measures between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.right = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            taught = self(x).softmax(-1)
        self.log("right", self.right(taught, y), on_step=False, on_epoch=True)
        self.log("sure", taught.max(-1).values.mean())
        y_of_noisy = self(x + 0.3)
        self.log("loss", loss := F.cross_entropy(y_of_noisy, y) + F.cross_entropy(y_of_noisy, taught))
        return loss


class Student(Classifier):
    """The teacher's call comes last."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        noisy = self(x + 0.3)
        with torch.no_grad():
            taught = self(x)
        return F.cross_entropy(noisy, y) + F.mse_loss(noisy, taught)


class Gan(Classifier):
    """A discriminator sees real rows, and then generated ones: the last stages are called before the first."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        real = self.net[8:](x)
        fake = self.net[8:](self.net[:8](x.flip(0)))
        return F.cross_entropy(real, y) + F.softplus(fake.mean(-1)).mean()


class Collects(Mlp):
    """Counts and collects in the step, where neither the void step nor the rounds may leave a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.count = [], 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.count += 1
        h = self.fc2(self.fc1(x))
        return self.fc4(F.relu(self.fc3(h)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y) + self(2 * x).square().mean()


QUIET: dict[str, Any] = {"validate": False}
ONE = {"num_microbatches": 1}
DOUBLE = {"precision": "64-true"}
SAME = {
    "R-Drop": Case(RDrop, row_loader, {}, {"max_epochs": 2}),
    "R-Drop, recomputed": Case(RDrop, row_loader, {"recompute": "stage"}, {"accumulate_grad_batches": 2}),
    "R-Drop, blocks recomputed": Case(RDrop, row_loader, {"recompute": "block"}, **QUIET),
    "R-Drop, gpipe, other shapes": Case(RDrop, lambda: row_loader((8, 6, 5)), {"schedule": "gpipe"}, **QUIET),
    "R-Drop, checkpointed": Case(Checkpointed, row_loader, {"blocks": "net"}, **QUIET),
    "R-Drop in bf16": Case(RDrop, row_loader, {}, {"precision": "bf16-mixed"}, **QUIET),
    "R-Drop, an activation shared": Case(SharedActivation, row_loader, {"partition": "count"}, **QUIET),
    "SimCLR": Case(SimCLR, row_loader, ONE),
    "SimCLR with BatchNorm": Case(NormedSimCLR, row_loader, ONE, {"max_epochs": 2}),
    "the first half twice": Case(Halves, row_loader),
    "taught by itself": Case(Taught, row_loader, **QUIET),
    "student": Case(Student, row_loader, **QUIET),
    "discriminator": Case(Gan, row_loader),
}


@pytest.fixture(scope="module")
def references() -> dict[str, Record]:
    return {name: one_process(case) for name, case in SAME.items()}


FEW = ["R-Drop", "SimCLR with BatchNorm", "the first half twice", "taught by itself", "discriminator"]


@pytest.mark.parametrize(
    ("num_stages", "names"),
    [
        (2, list(SAME)),
        pytest.param(4, FEW, marks=pytest.mark.slow),
        pytest.param(4, [name for name in SAME if name not in FEW], marks=pytest.mark.slow),
    ],
)
def test_as_in_one_process(references: dict[str, Record], num_stages: int, names: list[str]):
    for name, records in zip(names, many_on_stages([SAME[name] for name in names], num_stages), strict=True):
        assert_named(name, records, references[name])


def assert_named(name: str, records: list[Record], reference: Record) -> None:
    close = BF16 if "bf16" in name else WEIGHTS
    try:
        assert_same(records, reference, close, close)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize(
    "schedules",
    [
        ["interleaved_1f1b", "zb_v", "chimera"],
        pytest.param(["zb_h1", "zb_h2", "looped_bfs", "gems", "dualpipe"], marks=pytest.mark.slow),
    ],
    ids=",".join,
)
def test_with_every_kind_of_schedule(references: dict[str, Record], schedules: list[str]):
    """Several stages a rank, backwards in two halves, two directions."""
    cases = [SAME["R-Drop"].but({"schedule": schedule}) for schedule in schedules]
    *others, measured = many_on_stages([*cases, SAME["taught by itself"].but({"schedule": schedules[-1]})], 2)
    for schedule, records in zip(schedules, others, strict=True):
        assert_named(schedule, records, references["R-Drop"])
    assert_named(schedules[-1], measured, references["taught by itself"])


def test_dropout_of_every_call_is_the_same_on_any_layout():
    case = Case(RDropDrops, row_loader, {"blocks": "net"}, **QUIET)
    [one] = on_stages(case, 1)
    others = [case.but({"recompute": "stage"}), case.but({"recompute": "block"}), case.but({"schedule": "zb_v"})]
    for records in [*many_on_stages([case, *others], 2), on_stages(case, 4)]:
        assert_ranks_agree(records)
        assert torch.equal(torch.stack(records[0].losses), torch.stack(one.losses))
        for name, value in one.weights.items():
            # The two calls' gradients of a weight are added up in one backward, in an order that autograd chooses.
            torch.testing.assert_close(records[0].weights[name], value, **WEIGHTS)


def test_a_recomputation_draws_what_its_call_drew():
    case = Case(RDropDrops, row_loader, {"blocks": "net"}, **QUIET)
    checkpointed = case.but(make=CheckpointedDrops)
    for (kept, _), (recomputed, _) in [many_on_stages([case, checkpointed], 2)]:
        assert torch.equal(torch.stack(recomputed.losses), torch.stack(kept.losses))
        for name, value in kept.weights.items():
            torch.testing.assert_close(recomputed.weights[name], value, **WEIGHTS)


def normed_loop(net: nn.Sequential, num_microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Each micro-batch by its own statistics; the running ones once a call, by those of the whole batch."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
    for x, y in rows():
        optimizer.zero_grad()
        seen: dict[tuple[nn.Module, int], list[Tensor]] = {}
        total = 0.0
        for part, labels in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True):
            loss = 0.0
            for call, h in enumerate((part, 2 * part)):
                for module in net:
                    if isinstance(module, nn.BatchNorm1d):
                        seen.setdefault((module, call), []).append(h.detach())
                        h = F.batch_norm(h, None, None, module.weight, module.bias, training=True)
                    else:
                        h = module(h)
                loss = loss + F.cross_entropy(h, labels) / num_microbatches
            loss.backward()
            total += float(loss.detach())
        for (module, _), inputs in sorted(seen.items(), key=lambda entry: entry[0][1]):
            module(torch.cat(inputs))  # moves the running statistics once
        optimizer.step()
        losses.append(total)
    return losses, net.state_dict()


def test_running_statistics_take_a_step_for_every_call():
    torch.manual_seed(1)
    losses, state = normed_loop(normed(), 2)
    case = Case(NormedTwice, row_loader, {"num_microbatches": 2, "check_loss": False}, **QUIET)
    for first, _ in many_on_stages([case, case.but({"recompute": "stage"}), case.but({"schedule": "gems"})], 2):
        torch.testing.assert_close(torch.stack(first.losses), torch.tensor(losses), rtol=2e-5, atol=2e-6)
        for name, value in state.items():
            torch.testing.assert_close(first.weights[f"net.{name}"], value, **WEIGHTS)


class LanguageModel(HuggingFaceLM):
    """GPT-2 says of a sequence what it says of it beside others."""

    def __init__(self) -> None:
        super().__init__("gpt2", vocabulary=11, context=16, width=16, num_heads=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        one, other = (self.model(input_ids=t, labels=t) for t in (tokens, tokens.flip(0)))
        self.log("loss", loss := one.loss + other.loss + F.mse_loss(one.logits, other.logits.flip(0)))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.slow
def test_a_model_of_transformers():
    assert_parity(Case(LanguageModel, token_loader, ONE))


class Averages(RDrop):
    """Predicts and tests by the mean of two runs."""

    def mean(self, x: Tensor) -> Tensor:
        return (self(x) + self(x + 0.1)) / 2

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.mean(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean(batch[0])


def predictions(trainer: Any, module: LightningModule) -> Any:
    tested = trainer.test(module, row_dataset(12, 8), verbose=False)
    return tested, trainer.predict(module, row_dataset(12, 8))


def test_test_and_predict():
    case = Case(Averages, row_loader, after=predictions, **QUIET)
    tested, predicted = one_process(case).extra
    for first, second in many_on_stages([case, *(case.but({"schedule": s}) for s in ("zb_v", "chimera"))], 2):
        assert first.extra[0] == [pytest.approx(tested[0], rel=2e-5)] and second.extra[0] == first.extra[0]
        for ours, theirs in zip(first.extra[1], predicted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def collected(trainer: Any, module: Any) -> Any:
    """What the module collected; the steps that were measured; what travels to the next stage."""
    [executor] = trainer.strategy.pipeline.engine.executors.values()
    contracts = [] if executor.departure is None else list(executor.departure._contracts.values())
    return module.seen, module.count, trainer.strategy.stats._step, [list(contract.needed) for contract in contracts]


def test_a_void_step_leaves_no_trace_and_only_what_is_needed_travels():
    last, first = (record.extra for record in on_stages(Case(Collects, row_loader, CUT, at_end=collected, **QUIET), 2))
    assert last == ([2, 2] * 4 * 3, 2 * 4 * 3, 3, [])  # three steps of four micro-batches, each with two calls
    assert first[2:] == (3, [[0, 1]])  # of each call the argument of `fc3`


# -- refused in words --------------------------------------------------------------------------------------------------


class FeedsBack(Classifier):
    """Refines what it said."""

    def __init__(self) -> None:
        super().__init__(chain(8))
        self.embed = nn.Linear(CLASSES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.embed(self.net(x)))


class SharesALayer(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc3(self.fc2(self.fc1(x)))
        return self.fc4(self.fc2(h))


class ReadsBetween(Classifier):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        first = F.cross_entropy(self(x), y)
        return first + (1.0 if first.item() > 0 else 0.5) * F.cross_entropy(self(-x), y)


class Adds(nn.Module):
    """Saves nothing of its argument for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class WritesBehind(Mlp):
    """Changes what it has handed to a block."""

    def __init__(self) -> None:
        super().__init__()
        self.fc3 = Adds()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc2(self.fc1(x)))
        y = self.fc3(h)
        return self.fc4(y * h.mul_(0.5).sum(-1, keepdim=True).detach().sign())

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y) + F.cross_entropy(self(-x), y)


class ResidualInPlace(Classifier):
    """Adds to what came from another stage where it lies, and does so in two calls."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.head, self.calls = nn.Linear(WIDTH, CLASSES), 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(x)
        for block in self.blocks:
            h += block(h)
        return self.head(h)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return sum(F.cross_entropy(self(x - call), y) for call in range(self.calls))  # type: ignore[return-value]


class ResidualInPlaceOnce(ResidualInPlace):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 1


class Says(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), lambda: None


class SaysTooMuch(Mlp):
    """The last stage returns what other stages, which go on behind it, cannot be told."""

    def __init__(self) -> None:
        super().__init__()
        self.fc4 = Says(8, CLASSES)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x)[0], y) + F.cross_entropy(self(-x)[0], y)


class OnceAndThenTwice(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss + self.loss(batch) if batch_idx else loss


class TwiceAndThenOnce(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss if batch_idx else loss + self.loss(batch)


REFUSED = [
    (FeedsBack, {}, "a value computed from the output of `embed` (stage 1), whose data stage 0 does not hold. A stage"),
    (FeedsBack, {}, "makes all its calls of a step before later stages run, so what these return cannot come back"),
    (SharesALayer, CUT, "make a layer that several stages use one for each and tie their weights"),
    (
        ReadsBetween,
        {},
        "Here it does so between calls of the model, all of which a stage makes before later stages run",
    ),
    (
        ResidualInPlace,
        {"blocks": "blocks"},
        "all of which a stage makes before later stages run: use an operator that is not in place (h = h + block(h),",
    ),
    (SaysTooMuch, CUT, "What the modules of stage 1 return cannot be described to the other stages: "),
    (WritesBehind, CUT, "The step writes into an argument of `fc3` after it called it, and before it calls it again:"),
    (OnceAndThenTwice, {}, "Module `net.0` (stage 0) is called again in one step, and stage 0 has ended by then. Call"),
    (TwiceAndThenOnce, {}, "the first block of stage 1, as often as before (1 times, not 2). A step must call every"),
    (RDrop, {"dynamic_shapes": True}, "as often in every step as in the first of its kind (and leave dynamic_shapes"),
    (SimCLR, {}, "The loss is not a mean over rows. Give PipelineStrategy(loss_weight="),
]


def test_a_value_of_another_stage_may_be_added_to_in_place_where_the_model_is_called_once():
    assert_parity(Case(ResidualInPlaceOnce, row_loader, {"blocks": "blocks"}), stages=(4,))


class ValidatesWithWrites(WritesBehind):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.fc4(self.fc3(self.fc2(self.fc1(batch[0])))), batch[1])


def test_without_gradients_a_step_may_write_into_what_it_handed_on():
    assert_parity(Case(ValidatesWithWrites, row_loader, CUT), stages=(2,))


@pytest.mark.parametrize(("make_module", "options", "text"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused(make_module: Any, options: dict[str, Any], text: str):
    assert text in failure_of(Case(make_module, row_loader, options, **QUIET))
