"""Dropout and BatchNorm: the same numbers on 1, 2 and 4 stages, and those of a slow plain loop over micro-batches."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.pipeline.stage.random_streams import mix
from tests.trainer.modules import CLASSES, WIDTH, Classifier, Mlp, chain, row_loader, rows
from tests.trainer.pipelines import WEIGHTS, Case, Record, assert_ranks_agree, assert_same, on_stages, one_process

SIZES = (8, 8, 6)
SPLIT = {8: (2, 2, 2, 2), 6: (2, 2, 1, 1)}


class DropoutEverywhere(Mlp):
    """Dropout modules without parameters, inside a block, and drawn by the step itself between and after modules."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.fc3 = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.fc1(x + 0.1 * torch.randn_like(x)))
        x = F.dropout(F.relu(self.fc2(x)), 0.5, self.training)
        if random.random() + numpy.random.rand() > 1.0:  # as LayerDrop and mixup draw
            x = x * 2
        x = self.fc4(F.relu(self.fc3(x)))
        return x + torch.rand(()) * 0.1


def layouts(case: Case) -> list[Record]:
    records = []
    for num_stages in (1, 2, 4):
        ranks = on_stages(case, num_stages)
        assert_ranks_agree(ranks)
        records.append(ranks[0])
    return records


@pytest.mark.parametrize("make_module", [lambda: Classifier(chain(4, lambda: nn.Dropout(0.3))), DropoutEverywhere])
def test_random_numbers_do_not_depend_on_the_layout(make_module):
    # "auto" may find other blocks for four stages than for two; streams belong to modules that the cut knows.
    blocks = "net" if make_module is not DropoutEverywhere else ["fc1", "fc2", "fc3", "fc4"]
    case = Case(make_module, lambda: row_loader(SIZES), {"blocks": blocks}, {"max_epochs": 2})
    one, two, four = layouts(case)
    for other in (two, four):
        assert torch.equal(torch.stack(other.losses), torch.stack(one.losses))
        assert all(torch.equal(other.weights[name], one.weights[name]) for name in one.weights)
    other_seed = on_stages(case.but(seed=2), 2)[0]
    assert not torch.equal(other_seed.losses[0], one.losses[0])


class DropsTwice(Mlp):
    """Calls one dropout module twice and logs how often its two masks agree."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.fc2(F.relu(self.fc1(x)))
        first, second = self.drop(torch.ones(len(y), 8)), self.drop(torch.ones(len(y), 8))
        x = self.fc4(F.relu(self.fc3(x * first * second)))
        self.log("agree", (first == second).float().mean())
        return F.cross_entropy(x, y)


def test_a_dropout_module_that_is_called_twice_draws_two_masks():
    blocks = ["fc1", "fc2", "fc3", "fc4"]
    one, two, four = layouts(Case(DropsTwice, lambda: row_loader(SIZES), {"blocks": blocks}, validate=False))
    assert one.metrics == two.metrics == four.metrics
    assert 0.2 < float(one.metrics[-1]["callback/agree"]) < 0.8  # 64 fair coins


def test_the_same_seed_and_layout_repeat_bit_by_bit():
    case = Case(lambda: Classifier(chain(4, lambda: nn.Dropout(0.3))), lambda: row_loader(SIZES))
    first, second = on_stages(case, 2)[0], on_stages(case, 2)[0]
    assert torch.equal(torch.stack(first.losses), torch.stack(second.losses))
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def plain_loop(
    net: nn.Sequential, batches: list[tuple[Tensor, Tensor]], seed: int
) -> tuple[list[float], dict[str, Tensor]]:
    """What a pipeline is to compute: micro-batches in order, each module with the stream that is its own."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        total, start = 0.0, 0
        for m, size in enumerate(SPLIT[len(x)]):
            key = mix(seed, 2 * number, m)  # training batches have even numbers
            h = x[start : start + size]
            for index, module in enumerate(net):
                torch.manual_seed(key ^ mix(2 * index))
                h = module(h)
            loss = F.cross_entropy(h, y[start : start + size]) * (size / len(x))
            loss.backward()
            total, start = total + float(loss.detach()), start + size
        optimizer.step()
        losses.append(total)
    return losses, net.state_dict()


def test_dropout_is_that_of_a_plain_loop():
    def network() -> nn.Sequential:
        layers = [block for _ in range(3) for block in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4))]
        return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    torch.manual_seed(5)
    losses, weights = plain_loop(network(), rows(SIZES), seed=5)
    for num_stages in (2, 4):
        record = on_stages(Case(lambda: Classifier(network()), lambda: row_loader(SIZES), seed=5), num_stages)[0]
        # The loop adds the micro-batches' losses in Python's float64.
        torch.testing.assert_close(torch.stack(record.losses), torch.tensor(losses), rtol=1e-6, atol=1e-7)
        for name, value in weights.items():
            torch.testing.assert_close(record.weights[f"net.{name}"], value, **WEIGHTS)


def batch_normed(momentum: float | None = 0.1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=momentum), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Normed(Classifier):
    """Two micro-batches of each batch, as BatchNorm needs more than one row."""

    momentum: float | None = 0.1

    def __init__(self) -> None:
        super().__init__(batch_normed(self.momentum))


class CumulativelyNormed(Normed):
    """Running statistics as plain averages."""

    momentum = None


def normed_loop(
    net: nn.Sequential, batches: list[tuple[Tensor, Tensor]], num_microbatches: int
) -> tuple[list[float], Any]:
    """Each micro-batch by its own statistics; the running ones by the whole batch's, with torch's own formula."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    norms = [module for module in net if isinstance(module, nn.BatchNorm1d)]
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
        total = 0.0
        for part, labels in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True):
            h = part
            for module in net:
                if module in seen:
                    seen[module].append(h.detach())
                    h = F.batch_norm(h, None, None, module.weight, module.bias, training=True)
                else:
                    h = module(h)
            loss = F.cross_entropy(h, labels) / num_microbatches
            loss.backward()
            total += float(loss.detach())
        for norm, inputs in seen.items():
            norm(torch.cat(inputs))  # moves the running statistics once
        optimizer.step()
        losses.append(total)
    return losses, net.state_dict()


@pytest.mark.parametrize("make_module", [Normed, CumulativelyNormed])
def test_batch_norm_is_that_of_a_plain_loop(make_module):
    torch.manual_seed(1)
    losses, state = normed_loop(batch_normed(make_module.momentum), rows((8, 8, 8)), 2)
    for num_stages in (1, 2, 4):
        case = Case(make_module, row_loader, {"num_microbatches": 2})
        records = on_stages(case, num_stages)
        assert_ranks_agree(records)
        torch.testing.assert_close(torch.stack(records[0].losses), torch.tensor(losses), rtol=2e-5, atol=2e-6)
        for name, value in state.items():
            torch.testing.assert_close(records[0].weights[f"net.{name}"], value, **WEIGHTS)


def test_running_statistics_of_the_first_norm_are_one_processs_and_one_micro_batch_is_one_process():
    case = Case(Normed, row_loader, {"num_microbatches": 2}, {"max_steps": 1, "num_sanity_val_steps": 2})
    reference, record = one_process(case), on_stages(case, 2)[0]
    assert (
        record.weights["net.1.num_batches_tracked"] == 1
    )  # neither sanity check, shape agreement nor loss check count
    for name in ("net.1.running_mean", "net.1.running_var"):
        torch.testing.assert_close(record.weights[name], reference.weights[name], rtol=1e-6, atol=1e-7)
    whole = case.but({"num_microbatches": 1}, {"max_steps": 3})
    assert_same(on_stages(whole, 2), one_process(whole))
