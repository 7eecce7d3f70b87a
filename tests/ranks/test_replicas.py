"""Sums of gradients over the ranks that hold a replica of a stage: begun in one order, taken when they are wanted."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.pipeline.parameters import ParameterTable
from lightning_parallel.pipeline.partition import lay_out
from lightning_parallel.pipeline.replica_check import compare
from lightning_parallel.pipeline.replicas import GradientSums, equalize_gradients, plan, shares_of
from lightning_parallel.pipeline.schedules import make
from tests.harness import run_ranks


def table_of(name: str, num_ranks: int, num_microbatches: int, row: int) -> tuple[Any, ParameterTable]:
    """A schedule, and a chain of linear layers of which stage s is layer s."""
    torch.manual_seed(0)
    schedule = make(name, num_ranks, num_microbatches)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_ranks)))
    layout = lay_out(model, num_ranks, "auto", "count", None, None)
    held = [[row for (_, s), row in sorted(schedule.placement.items()) if s == stage] for stage in range(num_ranks)]
    return schedule, ParameterTable(model, layout, held, row)


@pytest.mark.parametrize("name", ["gems", "chimera", "chimera:pairs=2", "chimera:doubling=true", "dualpipe"])
@pytest.mark.parametrize("num_microbatches", [3, 8, 13])
def test_all_rows_begin_their_sums_in_one_order(name: str, num_microbatches: int):
    """Two rows begin what they share in one order, each after its last backward of it: so nobody waits in a circle."""
    orders = []
    for row in range(4):
        schedule, table = table_of(name, 4, num_microbatches, row)
        planned = plan(schedule, shares_of(table), row)
        for at, share in planned:
            later = schedule.actions[row][at + 1 :]
            assert not [a for a in later if a.stage in share.stages and a.kind in "BIW"]
        orders.append([share for _, share in planned])
    for ours in orders:
        for theirs in orders:
            assert [share for share in ours if share in theirs] == [share for share in theirs if share in ours]


def test_sums_are_taken_by_name_and_what_nobody_made_stays_none():
    def run(rank: int) -> Any:
        schedule, table = table_of("chimera", 2, 2, rank)
        sums = GradientSums(table, {(0, 1): dist.new_group([0, 1])}, torch.device("cpu"))
        parameters = dict(table.model.named_parameters())
        table.model[1].bias.requires_grad_(False)
        parameters["0.weight"].grad = torch.full((2, 2), 1.0 + rank)
        if rank:
            parameters["0.bias"].grad = torch.ones(2)
        begun = sums.begin(schedule)
        for number in range(-1, len(schedule.actions[rank])):
            begun.after(number)
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        sums.collect(gradients)
        return gradients

    for gradients in run_ranks(run, 2):
        assert torch.equal(gradients["0.weight"], torch.full((2, 2), 3.0))
        assert torch.equal(gradients["0.bias"], torch.ones(2))
        assert gradients["1.weight"] is None and gradients["1.bias"] is None


def test_a_gradient_that_grows_after_its_sum_has_begun_is_refused():
    def run(rank: int) -> str:
        schedule, table = table_of("gems", 2, 2, rank)
        sums = GradientSums(table, {(0, 1): dist.new_group([0, 1])}, torch.device("cpu"))
        weight = table.model[0].weight
        weight.grad = torch.ones(2, 2)
        begun = sums.begin(schedule)
        for number in range(-1, len(schedule.actions[rank])):
            begun.after(number)
        weight.grad += 1
        with pytest.raises(ValueError, match="got a gradient from another stage's backward: the step uses it") as told:
            sums.collect({name: parameter.grad for name, parameter in table.model.named_parameters()})
        return str(told.value)

    assert run_ranks(run, 2)[0].startswith("Parameter `0.weight` of stage 0 got a gradient")


@pytest.mark.parametrize("name", ["gems", "1f1b"])
def test_gradients_that_rounded_apart_are_made_one_again(name: str):
    """With replicas every layer is shared; with one direction a tied weight is, and others are left alone."""

    def run(rank: int) -> Any:
        schedule, table = table_of(name, 2, 2, rank)
        if name == "1f1b":
            table.model[1].weight = table.model[0].weight
            held = [[schedule.placement[0, stage]] for stage in (0, 1)]
            table = ParameterTable(table.model, table.layout, held, rank)
        for parameter in table.model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
        groups = {(0, 1): dist.new_group([0, 1])}
        equalize_gradients(table, [0, 1], groups)
        return {entry.name: parameter.grad[0] for entry, parameter in table.own()}

    first, second = run_ranks(run, 2)
    assert torch.equal(first["0.weight"], torch.ones(2)) and torch.equal(second["0.weight"], torch.ones(2))
    assert second["1.bias"] == 2.0  # row 1 holds stage 1 first, or alone
    assert first.get("1.bias") == (2.0 if name == "gems" else None)


def test_replicas_that_part_are_named():
    def run(rank: int) -> str:
        _, table = table_of("gems", 2, 2, rank)

        def gather(value: Any) -> list[Any]:
            box: list[Any] = [None, None]
            dist.all_gather_object(box, value)
            return box

        compare(table, [1, 0], gather, "before anything")
        with torch.no_grad():
            table.model[1].weight[0] = table.model[1].weight[rank].clone()  # rank 1 has its rows twice
        with pytest.raises(ValueError, match="is no longer the same") as told:
            compare(table, [1, 0], gather, "after a change")
        return str(told.value)

    for text in run_ranks(run, 2):
        assert text.startswith("Parameter `1.weight` of stage 1 is no longer the same on all ranks that hold a replica")
        assert "found after a change" in text
