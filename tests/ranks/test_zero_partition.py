"""ZeRO stages 1 and 2 on forked ranks, beside DistributedDataParallel and beside plain loops in one process."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from lightning_parallel.zero.collectives import average_together
from lightning_parallel.zero.native.partition import Options, Partition
from lightning_parallel.zero.ranks import Ranks
from lightning_parallel.zero.sharded_gradient import ShardedGradient, gather_gradient, total_norm
from tests.harness import run_ranks

WIDTH, ROWS, STEPS = 5, 8, 3
EXACT = {"rtol": 0.0, "atol": 0.0}
# Sums of four numbers come in another order than DistributedDataParallel's, whose buckets begin elsewhere.
ROUNDED = {"rtol": 1e-5, "atol": 1e-6}


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, a scalar, a branch that not every batch takes, a layer never used."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.branch = nn.Linear(7, 7)
        self.middle = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.middle.weight
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = torch.tanh(self.frozen(self.first(x)))
        x = x + self.branch(x) if branch else x
        return self.head(self.again(torch.tanh(self.norm(self.middle(x)) * self.scale)))


@dataclass
class Training:
    """A few steps, the same whoever does them."""

    optimizer: Callable[[list[nn.Parameter]], Any] = lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1)
    clip: float | None = None
    accumulate: int = 1
    branch: Callable[[int, int], bool] = lambda step, rank: True
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> Net:
        torch.manual_seed(3)
        return Net().to(self.dtype)

    def batch(self, step: int, part: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(100 * step + part)
        x, y = torch.randn(ROWS, WIDTH, generator=g), torch.randint(3, (ROWS,), generator=g)
        return x[rank::ranks].to(self.dtype), y[rank::ranks]

    def loss(self, forward: Any, step: int, part: int, rank: int, ranks: int) -> Tensor:
        x, y = self.batch(step, part, rank, ranks)
        return F.cross_entropy(forward(x, self.branch(step, rank)).float(), y) / self.accumulate

    def groups(self, model: Net) -> list[dict[str, Any]]:
        """Two groups, of which many ranks own nothing of the second; the frozen layer's parameters are in one."""
        second = {id(model.first.bias), id(model.scale)}
        ps = list(model.parameters())
        return [
            {"params": [p for p in ps if id(p) not in second]},
            {"params": [p for p in ps if id(p) in second], "lr": 0.02},
        ]


def by_ddp(rank: int, ranks: int, training: Training) -> tuple[dict[str, Tensor], list[Tensor]]:
    model = training.model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer, losses = training.optimizer(training.groups(model)), []
    for step in range(STEPS):
        for part in range(training.accumulate):
            ddp.require_backward_grad_sync = part == training.accumulate - 1
            losses.append(training.loss(ddp, step, part, rank, ranks))
            losses[-1].backward()
        if training.clip is not None:
            clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}, [loss.detach() for loss in losses]


def by_zero(rank: int, ranks: int, training: Training, stage: int) -> Any:
    model = training.model()
    optimizer, losses = training.optimizer(training.groups(model)), []
    options = Options(stage=stage, **{"bucket_bytes": 200, **training.options})
    partition = Partition(model, [optimizer], Ranks(rank, ranks), options)
    for step in range(STEPS):
        for part in range(training.accumulate):
            partition.reducer.sync = part == training.accumulate - 1
            partition.share_buffers()
            losses.append(training.loss(model, step, part, rank, ranks))
            with partition.reducer.backward():
                losses[-1].backward()
        if training.clip is not None:
            clip(model, training.clip)
        optimizer.step()
        optimizer.zero_grad()
    values = {k: v.clone() for k, v in model.state_dict().items()}
    partition.release()
    return values, [loss.detach() for loss in losses]


def clip(model: nn.Module, value: float) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    scale = (value / (total_norm(gradients, 2.0, None) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)


def both(rank: int, ranks: int, training: Training, stage: int) -> Any:
    return by_ddp(rank, ranks, training), by_zero(rank, ranks, training, stage)


def all_cases(rank: int, ranks: int) -> dict[tuple[str, int], Any]:
    cases = CASES if ranks == 2 else {name: replace(CASES[name], optimizer=sgd) for name in ON_FOUR}
    return {(name, stage): both(rank, ranks, case, stage) for name, case in cases.items() for stage in (1, 2)}


@cache
def outcomes(ranks: int) -> list[dict[tuple[str, int], Any]]:
    """Of every rank what became of every case, in one launch."""
    return run_ranks(all_cases, ranks, ranks)


def assert_same_as_ddp(ranks: int, case: str, stage: int, tolerance: dict[str, float]) -> None:
    for rank, found in enumerate(outcomes(ranks)):
        theirs, ours = found[case, stage]
        torch.testing.assert_close(ours[1], theirs[1], **tolerance)
        for name, value in theirs[0].items():
            if rank == 0 or "running" not in name:  # which rank 0 gives the others before the next forward
                assert_alike(name, ours[0][name], value, tolerance)


def assert_alike(name: str, ours: Tensor, theirs: Tensor, tolerance: dict[str, float]) -> None:
    torch.testing.assert_close(ours, theirs, **tolerance, msg=lambda text: f"{name}: {text}")


def sgd(ps: Any) -> torch.optim.Optimizer:
    """Adam makes steps of one size also out of gradients that are zero but for rounding, as before a BatchNorm."""
    return torch.optim.SGD(ps, lr=0.1, momentum=0.9)


CASES = {
    "plain": Training(),
    "clipped": Training(sgd, clip=0.05),
    "accumulated": Training(sgd, accumulate=3, clip=0.05),
    "conditional": Training(branch=lambda step, rank: step == 1),
    "conditional by rank": Training(branch=lambda step, rank: rank == step % 2),
    "one bucket": Training(options={"bucket_bytes": 1 << 20}),
}
ON_FOUR = ("accumulated", "conditional by rank")


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_bits_of_ddp_on_two_ranks(case: str, stage: int):
    """Two numbers have one sum, whatever the order; but a norm's squares are added in another order."""
    tolerance = ROUNDED if CASES[case].clip is not None else EXACT
    accumulates_parts = stage == 2 and CASES[case].accumulate > 1  # reduced, then added; not added, then reduced
    assert_same_as_ddp(2, case, stage, ROUNDED if accumulates_parts else tolerance)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("case", ON_FOUR)
def test_values_of_ddp_on_four_ranks(case: str, stage: int):
    assert_same_as_ddp(4, case, stage, ROUNDED)


OPTIMIZERS = {
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.05),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.05, t0=1),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.05, amsgrad=True, maximize=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.05),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.05),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
}


def every_optimizer(rank: int) -> list[Any]:
    return [both(rank, 2, Training(make), 2) for make in OPTIMIZERS.values()]


def test_bits_of_ddp_with_every_optimizer():
    for pairs in run_ranks(every_optimizer, 2):
        for name, (theirs, ours) in zip(OPTIMIZERS, pairs, strict=True):
            assert_same_bits(name, theirs[0], ours[0])


def assert_same_bits(name: str, theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    for key, value in theirs.items():
        if name == "fused":  # its vector code takes other elements at a time
            torch.testing.assert_close(ours[key], value, **ROUNDED)
        else:
            assert torch.equal(ours[key], value), (name, key)


# -- 16-bit parameters with copies of 32 bits --------------------------------------------------------------------------


def with_master_weights(training: Training) -> dict[str, Tensor]:
    """The plain loop: a 16-bit model that computes, 32-bit parameters that are updated with its gradients."""
    model = training.model()
    masters = {name: nn.Parameter(p.detach().float().clone(), p.requires_grad) for name, p in model.named_parameters()}
    optimizer = training.optimizer(list(masters.values()))
    for step in range(STEPS):
        training.loss(model, step, 0, 0, 1).backward()
        for name, parameter in model.named_parameters():
            masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return model.state_dict()


def alike(rank: int, stage: int, training: Training) -> Any:
    """All ranks get the same rows, so that the mean of 16-bit gradients is exact."""
    model = training.model()
    optimizer = training.optimizer(list(model.parameters()))
    partition = Partition(model, [optimizer], Ranks(rank, 2), Options(stage=stage, bucket_bytes=200))
    for step in range(STEPS):
        with partition.reducer.backward():
            training.loss(model, step, 0, 0, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    kinds = {segment.dtype for bucket in partition.buckets for segment in bucket.segments if segment is not None}
    return {k: v.clone() for k, v in model.state_dict().items()}, kinds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [1, 2])
def test_master_weights_are_a_plain_loop_s(stage: int, dtype: torch.dtype):
    training = Training(lambda ps: torch.optim.AdamW(ps, lr=1e-3), dtype=dtype)
    expected = with_master_weights(training)
    for values, kinds in run_ranks(alike, 2, stage, training):
        assert kinds == {torch.float32}
        assert all(torch.equal(values[name], value) for name, value in expected.items())


# -- what users see ----------------------------------------------------------------------------------------------------


def gradients(rank: int, stage: int) -> Any:
    training = Training(branch=lambda step, rank: False)
    model, whole = training.model(), training.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = Partition(model, [optimizer], Ranks(rank, 2), Options(stage=stage, bucket_bytes=200))
    with partition.reducer.backward():
        training.loss(model, 0, 0, rank, 2).backward()
    ((training.loss(whole, 0, 0, 0, 2) + training.loss(whole, 0, 0, 1, 2)) / 2).backward()
    whole.norm.load_state_dict(model.norm.state_dict())
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    found = {name: p.grad for name, p in model.named_parameters()}
    for name, theirs in wanted.items():
        assert (found[name] is None) == (theirs is None), name
        if theirs is not None:
            torch.testing.assert_close(gather_gradient(found[name]), theirs)
            torch.testing.assert_close(found[name].norm(), theirs.norm())
            torch.testing.assert_close(found[name].abs().max(), theirs.abs().max())
            torch.testing.assert_close((2 * found[name]).sum(), 2 * theirs.sum(), rtol=1e-4, atol=1e-6)
    norms = clip_grad_norm_(model.parameters(), 0.1), clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(total_norm([p.grad for p in model.parameters() if p.grad is not None], 2.0, None),
                               torch.tensor(0.1), rtol=1e-4, atol=1e-5)  # fmt: skip
    held = sum(g.local.numel() for g in found.values() if g is not None)
    with pytest.raises(TypeError, match=r"which needs all of them\. Scale, clamp or zero it, take norms and sums"):
        found["head.weight"].view(-1)
    assert isinstance(found["head.weight"], ShardedGradient)
    return held, sum(g.numel() for g in found.values() if g is not None)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_users_see(stage: int):
    held = run_ranks(gradients, 2, stage)
    assert sum(own for own, _ in held) == held[0][1]


def unannounced(rank: int, stage: int) -> Any:
    """`loss.backward()` as in manual optimization, twice before a step."""
    training = Training(branch=lambda step, rank: rank == 0)
    model, whole = training.model(), training.model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, whole)]
    partition = Partition(model, optimizers[:1], Ranks(rank, 2), Options(stage=stage, bucket_bytes=200))
    partition.reducer.attach()
    for step in range(STEPS):
        for part in range(2):
            training.loss(model, step, part, rank, 2).backward()
            for other in range(2):
                (training.loss(whole, step, part, other, 2) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, **ROUNDED, msg=lambda text, name=name: f"{name} {text}")


@pytest.mark.parametrize("stage", [1, 2])
def test_backwards_that_nobody_announced(stage: int):
    run_ranks(unannounced, 2, stage)


def fewer_ranks_than_elements(rank: int) -> list[int]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    reference = copy.deepcopy(model)
    their = torch.optim.AdamW(reference.parameters(), lr=0.1)
    partition = Partition(model, [optimizer], Ranks(rank, 4), Options())
    for _ in range(2):
        with partition.reducer.backward():
            model(torch.ones(2, 1)).sum().backward()
        reference(torch.ones(2, 1)).sum().backward()
        for opt in (optimizer, their):
            opt.step()
            opt.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
    return [segment is not None for segment in partition.buckets[0].segments]


def test_ranks_that_own_nothing():
    owned = run_ranks(fewer_ranks_than_elements, 4)
    assert [sum(of) for of in owned] == [1, 1, 0, 0]


class WithNothing(nn.Module):
    """Has empty parameters: one registered last, which so comes first in a bucket, and one alone of its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.layer = nn.Linear(3, 2)
        self.last = nn.Parameter(torch.zeros(0, 4))


def empty_parameters(rank: int, stage: int) -> None:
    models = [WithNothing(), WithNothing()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    partition = Partition(models[0], optimizers[:1], Ranks(rank, 2), Options(stage=stage))
    for _ in range(2):
        with partition.reducer.backward():
            models[0].layer(torch.ones(2, 3)).sum().backward()
        models[1].layer(torch.ones(2, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stage", [1, 2])
def test_empty_parameters_have_a_place(stage: int):
    run_ranks(empty_parameters, 2, stage)


@pytest.mark.parametrize("message_bytes", [1, 24, 1000])
def test_averages_in_messages(message_bytes: int):
    """Of one tensor, of some, of all of a dtype: numbers of ranks are averaged, also where they lie apart in memory."""

    def on_rank(rank: int) -> list[Tensor]:
        tensors = [
            torch.full((3,), rank + 0.5),
            torch.full((2, 2), 3.0 * rank).t(),
            torch.full((2, 4), rank + 0.5)[:, 1],
        ]
        tensors.append(torch.full((), 2.0 * rank, dtype=torch.float16))
        average_together(tensors, None, message_bytes, torch.device("cpu"))
        return tensors

    for tensors in run_ranks(on_rank, 2):
        wanted = [torch.full((3,), 1.0), torch.full((2, 2), 1.5), torch.ones(2), torch.ones((), dtype=torch.float16)]
        torch.testing.assert_close(tensors, wanted, **EXACT)
