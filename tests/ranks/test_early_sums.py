"""Sums over the copies of a model that begin while a stage's last backward, or its last W, still runs."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.pipeline.gradients import buckets as buckets_module
from lightning_parallel.pipeline.gradients.data_axis import DataAxis
from lightning_parallel.pipeline.gradients.fresh_gradients import FreshGradients
from lightning_parallel.pipeline.gradients.gradient_sums import GradientSums
from lightning_parallel.pipeline.parameters.shared_parameters import SharedParameters
from lightning_parallel.pipeline.parameters.table import ParameterTable
from lightning_parallel.pipeline.partition.layout import lay_out
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.transport.channel import nobody_waits
from lightning_parallel.pipeline.weight_grad import backward_inputs
from tests.harness import run_ranks

LAYERS = 4


class Copy(SharedParameters):
    """One copy of a model of one stage on one rank, and what has a gradient whenever a sum begins."""

    def __init__(self, rank: int, unseen: Callable[[nn.Parameter], bool] = lambda parameter: False) -> None:
        buckets_module.BUCKET_BYTES = 1  # a bucket for every parameter
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(LAYERS)))
        self.parameters = list(self.model.parameters())
        layout = lay_out(self.model, 1, "auto", "count", None, None)
        self.gradients = FreshGradients(self.parameters)
        self.data = DataAxis([0, 1])
        self.table = ParameterTable(self.model, layout, [[0]], 0)
        self.own, self.device, self.waiting = list(self.table.own()), torch.device("cpu"), nobody_waits
        self.sums = GradientSums(self.table, self.gradients, {}, {(0,): dist.new_group([0, 1])}, unseen)
        self.x = torch.randn(3, 2, generator=torch.Generator().manual_seed(rank))
        self.without: list[list[str]] = []

    @contextmanager
    def sends_noted(self) -> Any:
        """Note for every sum that begins which parameters have no gradient yet."""
        begin = dist.all_reduce

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            self.without.append([name for name, p in self.model.named_parameters() if p.grad is None])
            return begin(*args, **kwargs)

        dist.all_reduce = all_reduce
        try:
            yield
        finally:
            dist.all_reduce = begin

    def step(self, schedule: Schedule, loss_of: Callable[[], torch.Tensor], keep: bool = False) -> None:
        """What a Trainer step does: backwards with gradients aside, then they are delivered and averaged."""
        actions = schedule.actions[0]
        with self.gradients.aside(keep), self.sends_noted():
            early = self.sums.begin(schedule, over_copies=True)
            for number, action in enumerate(actions):
                if action.kind == "F":
                    loss = loss_of()
                elif action.kind == "B" and early is not None:
                    with early.backward(action):
                        loss.backward()
                elif action.kind == "B":
                    loss.backward()
                elif action.kind == "I":
                    waiting = backward_inputs([loss], [None])
                elif action.kind == "W":
                    waiting.run(early.weights(action, waiting.parameters), fused=True)
                if early is not None:
                    early.after(number)
        self.deliver()

    def deliver(self) -> None:
        fresh = self.gradients.take()
        if self.take_means(fresh):
            return
        for parameter, gradient in fresh.items():
            before = parameter.grad
            parameter.grad = gradient if before is None or gradient is None else before.add_(gradient)
        self.data.average(self.parameters)

    def loss(self) -> torch.Tensor:
        return self.model(self.x).square().mean()

    def mean_of_copies(self, loss_of: Callable[["Copy"], torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of all copies' losses, each by a plain backward, averaged."""
        own, grads = self.x, []
        for rank in (0, 1):
            self.x = torch.randn(3, 2, generator=torch.Generator().manual_seed(rank))
            grads.append(torch.autograd.grad(loss_of(self), self.parameters))
        self.x = own
        return [(a + b) / 2 for a, b in zip(*grads, strict=True)]


def assert_means(copy: Copy, expected: list[torch.Tensor], times: float = 1.0) -> None:
    for parameter, mean in zip(copy.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, times * mean)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_bucket_is_sent_before_the_last_action_of_its_stage_has_ended(name: str):
    """When the sum of the last layer's weight begins, the first layer's weight has no gradient yet."""

    def run(rank: int) -> list[list[str]]:
        copy = Copy(rank)
        expected = copy.mean_of_copies(Copy.loss)
        copy.step(make(name, 1, 1), copy.loss)
        assert_means(copy, expected)
        return copy.without

    first, second = run_ranks(run, 2)
    assert first == second and len(first) == 2 * LAYERS  # one order
    for layer, without in enumerate(first[1::2][::-1]):  # a layer's bias goes first, the last layer before the others
        assert [name for name in without if "weight" in name] == [f"{earlier}.weight" for earlier in range(layer)]


def test_gradients_made_unseen_are_sent_when_the_action_is_over():
    def run(rank: int) -> list[list[str]]:
        copy = Copy(rank, unseen=lambda parameter: True)
        expected = copy.mean_of_copies(Copy.loss)
        copy.step(make("1f1b", 1, 1), copy.loss)
        assert_means(copy, expected)
        return copy.without

    assert run_ranks(run, 2)[0] == [[]] * 2 * LAYERS


def test_what_accumulated_goes_along():
    def run(rank: int) -> None:
        copy = Copy(rank)
        expected = copy.mean_of_copies(Copy.loss)
        copy.loss().backward()  # a step before, not averaged
        copy.step(make("1f1b", 1, 1), copy.loss, keep=True)
        assert_means(copy, expected, times=2.0)
        assert len(copy.without) == 2 * LAYERS

    run_ranks(run, 2)


def test_a_weight_that_reentrant_checkpoints_share_is_summed_again_at_the_end():
    """Its gradient comes in two parts, and the first is sent: all copies see it, and wait for the end from then on."""

    def loss(copy: Copy) -> torch.Tensor:
        layer, x = copy.model[3], copy.x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(layer, copy.model[0](x), use_reentrant=True)
        return (x + copy.model[2](copy.model[1](x))).square().mean()

    def plain(copy: Copy) -> torch.Tensor:
        x = copy.x
        for _ in range(2):
            x = copy.model[3](copy.model[0](x))
        return (x + copy.model[2](copy.model[1](x))).square().mean()

    def run(rank: int) -> Any:
        copy = Copy(rank)
        expected = copy.mean_of_copies(plain)
        copy.step(make("1f1b", 1, 1), lambda: loss(copy))
        assert_means(copy, expected)
        first = len(copy.without)
        copy.step(make("1f1b", 1, 1), lambda: loss(copy))
        assert_means(copy, expected)
        return first, len(copy.without)

    assert run_ranks(run, 2) == [(2 * LAYERS, 2 * LAYERS)] * 2


def test_what_was_changed_on_one_copy_before_the_end_counts():
    """A hook of one copy changes what had accumulated, after it was sent: all copies sum what is there now."""

    def run(rank: int) -> None:
        copy = Copy(rank)
        expected = copy.mean_of_copies(Copy.loss)
        copy.loss().backward()
        with copy.gradients.aside(keep=True):
            early = copy.sums.begin(make("1f1b", 1, 1), over_copies=True)
            assert early is not None
            copy.loss().backward()
            early.after(1)
        if rank:
            copy.model[1].weight.grad += 1
        copy.deliver()
        for parameter, mean in zip(copy.parameters, expected, strict=True):
            more = 0.5 if parameter is copy.model[1].weight else 0.0
            torch.testing.assert_close(parameter.grad, 2 * mean + more)

    run_ranks(run, 2)


def test_a_parameter_that_one_copy_uses_or_none():
    def run(rank: int) -> Any:
        copy = Copy(rank)
        used = [0, 3] if rank else [0, 1, 3]
        copy.step(make("1f1b", 1, 1), lambda: nn.Sequential(*(copy.model[i] for i in used))(copy.x).sum())
        return [parameter.grad for parameter in copy.parameters]

    first, second = run_ranks(run, 2)
    assert [gradient is None for gradient in first] == [False] * 4 + [True] * 2 + [False] * 2
    for ours, theirs in zip(first, second, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_a_sparse_gradient_is_refused():
    def run(rank: int) -> None:
        copy = Copy(rank)
        weight = copy.parameters[-1]
        with copy.gradients.aside(keep=False):
            early = copy.sums.begin(make("1f1b", 1, 1), over_copies=True)
            assert early is not None
            weight.grad = torch.zeros(2).to_sparse()
            with pytest.raises(ValueError, match=r"The gradient of `3.bias` is sparse, .* Use sparse=False"):
                early.after(1)

    run_ranks(run, 2)
