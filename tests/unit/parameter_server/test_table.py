"""Tables of parameters in groups, and torch optimizers on the server, against torch itself."""

from itertools import chain

import pytest
import torch

from lightning_parallel.parameter_server import BSP, ESSP, SSP, Asynchronous, BoundedDelay, DropOlderThan, Sandblaster
from lightning_parallel.parameter_server.consistency_names import gap_bound, rule_of
from lightning_parallel.parameter_server.from_torch import (
    Rates,
    ServedOptimizer,
    groups_of,
    initial_ranges,
    optimizer_state,
    update_of,
)
from lightning_parallel.parameter_server.messages import Entry
from lightning_parallel.parameter_server.table import Table

SHAPES = [[(3, 5), (5,)], [(2, 2, 2), (1,)]]
MAKE = {
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, weight_decay=0.1),
    "adam decoupled": lambda groups: torch.optim.Adam(groups, weight_decay=0.1, decoupled_weight_decay=True),
    "adamw": torch.optim.AdamW,
    "adagrad": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.1),
}


def parameters():
    g = torch.Generator().manual_seed(0)
    return [[torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in group] for group in SHAPES]


def optimizer_of(name, groups):
    return MAKE[name]([{"params": groups[0], "lr": 0.1}, {"params": groups[1], "lr": 0.025}])


@pytest.mark.parametrize("num_ranges", [1, 2, 3, 7])
def test_packing_keeps_every_element_once(num_ranges):
    groups = parameters()
    table = Table.of(groups, num_ranges)
    flat = table.pack(groups)
    assert flat.numel() == table.layout.size and len({end - start for start, end in table.layout.bounds}) == 1
    for ours, theirs in zip(table.unpack(flat), groups, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert flat.count_nonzero() == 15 + 5 + 8 + 1


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("num_ranges", [1, 3])
def test_ranges_step_as_torch_does_and_give_its_state(name, num_ranges):
    """From a state in the middle of a run, with two groups, under a rate that changes."""
    ours, theirs = parameters(), parameters()
    mine, plain = optimizer_of(name, ours), optimizer_of(name, theirs)
    g = torch.Generator().manual_seed(1)

    def gradients():
        return [[torch.randn(shape, generator=g) for shape in group] for group in SHAPES]

    def step(optimizer, groups, values):
        for parameter, value in zip(chain(*groups), chain(*values), strict=True):
            parameter.grad = value.clone()
        optimizer.step()

    for values in (gradients(), gradients()):
        step(mine, ours, values)
        step(plain, theirs, values)
    table = Table.of(ours, num_ranges)
    update = update_of(mine, table.widths)
    ranges, rates = initial_ranges(table, update, table.pack(groups_of(mine)), mine), Rates(mine, update)
    for factor in (1.0, 0.5, 0.25):
        values = gradients()
        for optimizer in (mine, plain):
            for group, lr in zip(optimizer.param_groups, (0.1, 0.025), strict=True):
                group["lr"] = lr * factor
        step(plain, theirs, values)
        for part, push in zip(ranges, table.layout.split(table.pack(values)), strict=True):
            part.apply(Entry(part.lsn + 1, push=push, lr=rates.read()))
    for found, wanted in zip(table.unpack(torch.cat([part.weights for part in ranges])), theirs, strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    state, expected = optimizer_state(table, {part.key: part.copy() for part in ranges}, mine), plain.state_dict()
    assert state["param_groups"] == expected["param_groups"] and state["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert all(torch.equal(state["state"][number][key], value) for key, value in values.items())


def test_what_servers_cannot_do_is_said():
    with pytest.raises(ValueError, match="The servers know SGD, Adagrad, Adam, AdamW, and this is NAdam"):
        update_of(torch.optim.NAdam(parameters()[0]), (1,))
    with pytest.raises(ValueError, match="The servers' Adam has no amsgrad, and a group has amsgrad=True"):
        update_of(torch.optim.Adam(parameters()[0], amsgrad=True), (1,))
    with pytest.raises(ValueError, match="The servers' Adagrad has no weight_decay"):
        update_of(torch.optim.Adagrad(parameters()[0], weight_decay=0.1), (1,))


def test_groups_that_part_ways_are_said():
    groups = parameters()
    optimizer = optimizer_of("sgd", groups)
    rates = Rates(optimizer, update_of(optimizer, Table.of(groups).widths))
    optimizer.param_groups[1]["lr"] = 0.01
    with pytest.raises(
        ValueError, match=r"Group 1 has lr=0\.01, but with a push travels one rate \(0\.1\), to which it would"
    ):
        rates.read()


def test_parameters_that_are_frozen_or_added_are_said():
    groups = parameters()
    groups[0][1].requires_grad_(False)
    optimizer = optimizer_of("adam", groups)
    assert [len(group) for group in groups_of(optimizer)] == [1, 2]
    held, tolerant = ServedOptimizer(optimizer), ServedOptimizer(optimizer, may_freeze=True)
    groups[1][0].requires_grad_(False)
    tolerant.check()
    text = r"The optimizer has 2 parameters that train of 4, and at first had 3 of 4; the servers' table is made once"
    with pytest.raises(ValueError, match=text):
        held.check()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="has 3 parameters that train of 5, and at first had 3 of 4"):
        tolerant.check()


def test_rules_have_names():
    rules = {"bsp": BSP(), "ssp": SSP(3), "essp": ESSP(3), "bounded_delay": BoundedDelay(3), "async": Asynchronous()}
    rules |= {"sandblaster": Sandblaster()}
    assert {name: rule_of(name) for name in rules} == rules
    assert rule_of("downpour", 4) == DropOlderThan(4) and rule_of(SSP(1)) == SSP(1)
    assert [gap_bound(rule) for rule in rules.values()] == [0, 3, 3, 3, None, None]
    for words, text in (
        (("bsp", 1), "nothing is stale"),
        (("sandblaster", 1), "nothing is stale"),
        (("asp",), "use one of"),
    ):
        with pytest.raises(ValueError, match=text):
            rule_of(*words)
    with pytest.raises(ValueError, match="give it to the rule"):
        rule_of(SSP(1), 1)
