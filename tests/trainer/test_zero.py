"""Runs under ZeRO are those under DDP: rows, losses, logged values, weights; in every precision, with any optimizer."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel.strategies import ZeROStrategy
from lightning_parallel.zero.optimizer.guarded_state import held_state
from tests.trainer.modules import CLASSES, WIDTH, Classifier, chain, row_dataset
from tests.trainer.pipelines import BF16, HALF
from tests.trainer.zeros import EACH, STAGES, Fit, ddp, on_ranks, zero

ROUNDED = {"rtol": 2e-5, "atol": 2e-6}


class Logs(Classifier):
    """BatchNorm, dropout, values logged in every way that several ranks can log them."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(chain(4, between=lambda: nn.BatchNorm1d(WIDTH)), nn.Dropout(0.2)))
        self.acc = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict({"mine": loss, "index": float(batch_idx)}, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        self.log("everybodys", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.acc(self(batch[0]), batch[1])
        self.log("acc", self.acc)
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class LogsUnderSgd(Logs):
    """Adam makes steps of one size also out of gradients that are zero but for rounding, as before a BatchNorm."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Unused(Classifier):
    """A rank and a batch decide which layers are used; one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.never = nn.Linear(CLASSES, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        return self.extra(x) if self.trainer.global_rank == self.trainer.fit_loop.epoch_loop.batch_idx % 2 else x


def half() -> Any:
    """What a Trainer makes of precision="16-mixed" on a GPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


RUNS = {
    "everything logged": Fit(Logs, {"max_epochs": 2}),
    "accumulated and clipped": Fit(
        LogsUnderSgd, {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    ),
    "branches of ranks": Fit(Unused, {"max_epochs": 1}),
    "bf16-mixed": Fit(Logs, {"max_epochs": 1, "precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "16-mixed": Fit(Logs, {"max_epochs": 1, "plugins": half, "gradient_clip_val": 0.1}),
    "bf16-true": Fit(Classifier, {"max_epochs": 1, "precision": "bf16-true"}),
}


@pytest.fixture(scope="module")
def results() -> Any:
    jobs: dict[tuple[str, int], Any] = {}
    for name, run in RUNS.items():
        jobs[name, 0] = (run, ddp(find_unused_parameters=True))
        jobs |= {(name, stage): (run, zero(stage, master_weights=False)) for stage in STAGES}
    return dict(zip(jobs, on_ranks(list(jobs.values()), 2, timeout=58.0), strict=True))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", RUNS)
def test_as_under_ddp(results: Any, name: str, stage: int):
    clipped = "gradient_clip_val" in RUNS[name].trainer  # the squares of a norm are added in another order
    exact = not clipped and not (stage == 2 and "accumulate_grad_batches" in RUNS[name].trainer)
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else ROUNDED
    if name == "bf16-true":  # the CPU rounds the elements of a vector's end otherwise than those of its middle
        tolerance = BF16
    if stage == 3:
        tolerance = BF16 if name == "bf16-true" else ROUNDED
    for theirs, ours in zip(results[name, 0], results[name, stage], strict=True):
        torch.testing.assert_close(ours.losses, theirs.losses, **tolerance)
        torch.testing.assert_close(ours.metrics, theirs.metrics, **tolerance)
    torch.testing.assert_close(results[name, stage][0].weights, results[name, 0][0].weights, **tolerance)


def test_ranks_see_different_rows(results: Any):
    first, second = results["everything logged", 2]
    assert not torch.equal(first.losses, second.losses)
    assert torch.equal(first.metrics["everybodys"], second.metrics["everybodys"])


def dtypes(states: Any) -> set[torch.dtype]:
    """In which precision an optimizer keeps its states, and so updates."""
    return {value.dtype for state in states.values() for value in state.values() if isinstance(value, Tensor)}


@pytest.mark.slow
def test_16_bit_parameters():
    """precision="16-true" has no loss scale under Lightning: as under DDP, or with divided copies of 32 bits."""
    options = {"max_epochs": 1, "precision": "16-true"}
    run = Fit(Classifier, options, after=lambda trainer, _: dtypes(held_state(trainer.optimizers[0])))
    makers = [zero(1), zero(2), zero(2, engine="fsdp2"), zero(3)]
    bare = [zero(stage, engine=engine, master_weights=False) for stage, engine in ((1, None), (2, "fsdp2"), (3, None))]
    theirs, *ours = on_ranks([(run, make) for make in (ddp(), *makers, *bare)], 2)
    for results, kind in zip(ours, [torch.float32] * 4 + [torch.float16] * 3, strict=True):
        torch.testing.assert_close(results[0].losses, theirs[0].losses, **HALF)
        torch.testing.assert_close(results[0].weights, theirs[0].weights, **HALF)
        assert results[0].extra == {kind}


# -- losses that overflow ----------------------------------------------------------------------------------------------


class Overflows(Classifier):
    """On rank 1 alone, and in one batch alone, gradients are not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx == 1 and self.trainer.global_rank == 1 else loss


def scale_at_the_end(trainer: Any, module: LightningModule) -> float:
    return trainer.precision_plugin.scaler.get_scale()


class OverflowsUnderAdam(Overflows):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.parametrize("strategy", EACH)
def test_an_overflow_of_one_rank_is_everybodys(strategy: Any):
    run = Fit(OverflowsUnderAdam, {"max_steps": 4, "plugins": half}, after=scale_at_the_end)
    [results] = on_ranks([(run, strategy)], 2, timeout=140.0)
    steps = {float(state["step"]) for state in results[0].optimizers[0]["state"].values()}
    assert steps == {3.0}  # of four one was left out
    for result in results:
        assert result.extra == 512.0  # half of 1024
        assert all(value.isfinite().all() for value in results[0].weights.values())


# -- several optimizers ------------------------------------------------------------------------------------------------


class Gan(LightningModule):
    """Two networks, two optimizers, manual optimization; toggled or not."""

    def __init__(self, toggle: bool = True, sgd: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle, self.sgd = toggle, sgd
        self.generator = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        of_generator, of_critic = self.optimizers()
        made = self._step(of_generator, lambda: F.softplus(-self.critic(self.generator(batch[0]))).mean())
        fake = self.generator(batch[0]).detach()
        judged = self._step(of_critic, lambda: F.softplus(self.critic(fake) - self.critic(batch[0])).mean())
        self.log_dict({"made": made, "judged": judged}, sync_dist=True)
        return made + judged

    def _step(self, optimizer: Any, loss: Any) -> Tensor:
        if self.toggle:
            self.toggle_optimizer(optimizer)
        value = loss()
        optimizer.zero_grad()
        self.manual_backward(value)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        if self.toggle:
            self.untoggle_optimizer(optimizer)
        return value.detach()

    def configure_optimizers(self) -> Any:
        make = (lambda ps: torch.optim.SGD(ps, 0.1)) if self.sgd else (lambda ps: torch.optim.Adam(ps, 0.01))
        return make(self.generator.parameters()), make(self.critic.parameters())


@pytest.mark.parametrize("toggle", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_gan_by_hand(toggle: bool):
    run = Fit(lambda: Gan(toggle), {"max_epochs": 2, "limit_val_batches": 0})
    jobs = [(run, ddp(find_unused_parameters=True)), *((run, zero(stage)) for stage in STAGES)]
    theirs, *ours = on_ranks(jobs, 2)
    for results in ours:
        torch.testing.assert_close(results[0].weights, theirs[0].weights, **ROUNDED)
        torch.testing.assert_close(results[1].losses, theirs[1].losses, **ROUNDED)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"stage": 4}, "ZeROStrategy(stage=4): stage is 1, 2 or 3."),
        ({"bucket_mb": 0}, "ZeROStrategy(bucket_mb=0): bucket_mb is a size above 0."),
        ({"offload": 1}, "ZeROStrategy(offload=1): offload is True or False."),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], text: str):
    with pytest.raises(ValueError) as caught:
        ZeROStrategy(**arguments)
    assert str(caught.value) == text


class Rotated(torch.optim.Optimizer):
    """A third party's optimizer that looks at matrices."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(group["lr"] * p.grad / p.grad.norm(dim=0))
        return loss


class Signed(Rotated):
    """A third party's optimizer that treats each element by itself."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(group["lr"] * p.grad.sign())
        return loss


def with_optimizer(make: Any) -> Any:
    return type("Own", (Classifier,), {"configure_optimizers": lambda self: make(self.parameters())})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda ps: Rotated(ps, lr=0.1), "its step on a matrix is not that on pieces of the matrix"),
        (torch.optim.Adafactor, "it keeps sums over the rows and columns of a matrix"),
    ],
)
def test_optimizers_that_are_refused(make: Any, reason: str):
    with pytest.raises(Exception) as caught:
        on_ranks([(Fit(with_optimizer(make)), zero(2))], 2)
    assert f"but {reason}; each rank holds pieces of parameters." in str(caught.value)


def test_a_third_partys_optimizer_that_treats_each_element_by_itself():
    run = Fit(with_optimizer(lambda ps: Signed(ps, lr=0.01)), loader=lambda: row_dataset(40, 4))
    theirs, ours = on_ranks([(run, ddp()), (run, zero(2))], 2)
    torch.testing.assert_close(ours[0].weights, theirs[0].weights, rtol=0.0, atol=0.0)


class Normed(Classifier):
    """Notes whether it trains with batch norms of all ranks' rows. Runs none: PyTorch has them on GPUs only."""

    def __init__(self) -> None:
        super().__init__(chain(4, between=lambda: nn.BatchNorm1d(WIDTH)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained_with = synchronised(self)
        return F.cross_entropy(self.net[-1](batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def synchronised(module: nn.Module) -> list[bool]:
    norms = (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [isinstance(norm, nn.SyncBatchNorm) for norm in norms]


@pytest.mark.parametrize("make", EACH)
def test_batch_norms_are_synchronised_where_the_trainer_is_told_to(make: Any):
    after = lambda trainer, module: (module.trained_with, synchronised(module))  # noqa: E731
    [results] = on_ranks([(Fit(Normed, {"sync_batchnorm": True, "max_steps": 1}, after=after), make)], 2)
    assert [result.extra for result in results] == [([True] * 3, [False] * 3)] * 2, "and reverted, as by DDP"


class Hooked(Classifier):
    """Halves gradients on their way."""

    def __init__(self, hook: str = "register_hook") -> None:
        super().__init__()
        self.hook = hook

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            getattr(parameter, self.hook)(lambda gradient: gradient * 0.5)


def test_hooks_on_parameters_that_fsdp2_does_not_call_are_refused():
    with pytest.raises(Exception, match=r"`net\.0\.weight` has a hook .*which FSDP2 does not call: backwards reach"):
        on_ranks([(Fit(Hooked, {"max_steps": 1}), zero(3))], 2)
