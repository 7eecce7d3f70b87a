"""Sums of gradients over the ranks that hold a replica of a stage: begun in one order, taken when they are wanted."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.pipeline.gradients import buckets as buckets_module
from lightning_parallel.pipeline.gradients.fresh_gradients import FreshGradients
from lightning_parallel.pipeline.gradients.gradient_sums import GradientSums, equalize_gradients
from lightning_parallel.pipeline.gradients.sum_order import plan, shares_of
from lightning_parallel.pipeline.parameters.replica_check import compare
from lightning_parallel.pipeline.parameters.shared_parameters import SharedParameters
from lightning_parallel.pipeline.parameters.table import ParameterTable
from lightning_parallel.pipeline.partition.layout import lay_out
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.transport.channel import nobody_waits
from tests.harness import run_ranks


def table_of(name: str, num_ranks: int, num_microbatches: int, row: int, layers: int = 1) -> tuple[Any, ParameterTable]:
    """A schedule, and a chain of linear layers of which each stage has as many."""
    torch.manual_seed(0)
    schedule = make(name, num_ranks, num_microbatches)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers * num_ranks)))
    layout = lay_out(model, num_ranks, "auto", "count", None, None)
    held = [[row for (_, s), row in sorted(schedule.placement.items()) if s == stage] for stage in range(num_ranks)]
    return schedule, ParameterTable(model, layout, held, row)


@pytest.mark.parametrize(
    "name", ["gems", "chimera", "chimera:pairs=2", "chimera:doubling=true", "dualpipe", "1f1b", "zb_h1"]
)
@pytest.mark.parametrize("num_microbatches", [3, 8, 13])
@pytest.mark.parametrize("tied", [False, True])
def test_all_rows_begin_their_sums_in_one_order(name: str, num_microbatches: int, tied: bool):
    """Two rows begin what they share in one order, each after its last backward of it: so nobody waits in a circle."""
    orders = []
    for row in range(4):
        schedule, table = table_of(name, 4, num_microbatches, row)
        if tied:
            table.model[3].weight = table.model[0].weight
            table = ParameterTable(table.model, table.layout, table.holders, row)
        planned = plan(schedule, shares_of(table, alone=True), row)
        assert {name for _, share in planned for entry in share.entries for name in entry.names} == {
            name for entry, _ in table.own() for name in entry.names
        }
        for at, share in planned:
            later = schedule.actions[row][at + 1 :]
            assert not [a for a in later if a.stage in share.stages and a.kind in "BIW"]
        orders.append([share for _, share in planned])
    for ours in orders:
        for theirs in orders:
            assert [share for share in ours if share in theirs] == [share for share in theirs if share in ours]


class Holder(SharedParameters):
    """One of two ranks that hold what a table says."""

    def __init__(self, table: ParameterTable) -> None:
        self.table, self.own, self.device, self.waiting = table, list(table.own()), torch.device("cpu"), nobody_waits
        self.ranks, self._group, self._groups = (0, 1), lambda: None, {(0, 1): dist.new_group([0, 1])}
        self.gradients = FreshGradients([parameter for _, parameter in self.own])
        self.sums = GradientSums(table, self.gradients, self._groups, {})

    def begin(self, schedule: Schedule) -> Any:
        return self.sums.begin(schedule, over_copies=False)

    def collect(self) -> dict[str, Any]:
        gradients = {entry.name: parameter.grad for entry, parameter in self.own}
        self.sum_shared(gradients)
        return gradients


def test_sums_are_taken_by_name_and_what_nobody_made_stays_none():
    def run(rank: int) -> Any:
        schedule, table = table_of("chimera", 2, 2, rank)
        holder, parameters = Holder(table), dict(table.model.named_parameters())
        table.model[1].bias.requires_grad_(False)
        parameters["0.weight"].grad = torch.full((2, 2), 1.0 + rank)
        if rank:
            parameters["0.bias"].grad = torch.ones(2)
        begun = holder.begin(schedule)
        for number in range(-1, len(schedule.actions[rank])):
            begun.after(number)
        return holder.collect()

    for gradients in run_ranks(run, 2):
        assert torch.equal(gradients["0.weight"], torch.full((2, 2), 3.0))
        assert torch.equal(gradients["0.bias"], torch.ones(2))
        assert gradients["1.weight"] is None and gradients["1.bias"] is None


def test_a_gradient_that_grows_on_one_rank_after_its_sum_has_begun_is_summed_anew():
    """On both ranks, which leave sums to the step's end from then on."""

    def run(rank: int) -> Any:
        schedule, table = table_of("gems", 2, 2, rank)
        holder, weight = Holder(table), table.model[0].weight
        weight.grad = torch.ones(2, 2)
        begun = holder.begin(schedule)
        for number in range(-1, len(schedule.actions[rank])):
            begun.after(number)
        weight.grad += rank
        return holder.collect()["0.weight"], holder.begin(schedule)

    for gradient, after in run_ranks(run, 2):
        assert torch.equal(gradient, torch.full((2, 2), 3.0)) and after is None


@pytest.mark.parametrize("name", ["gems", "chimera"])
def test_sums_begin_while_a_stages_last_backward_still_runs(name: str, monkeypatch: pytest.MonkeyPatch):
    """Each stage is two layers. Its second layer's bias and weight leave when the first has no gradient yet."""
    monkeypatch.setattr(buckets_module, "BUCKET_BYTES", 1)  # a bucket for every parameter

    def run(rank: int) -> Any:
        schedule, table = table_of(name, 2, 2, rank, layers=2)
        holder, model = Holder(table), table.model
        noted, begin = [], dist.all_reduce

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("async_op"):
                noted.append([name for name, parameter in model.named_parameters() if parameter.grad is None])
            return begin(*args, **kwargs)

        rows = [torch.randn(3, 2, generator=torch.Generator().manual_seed(of)) for of in (0, 1)]
        stages, parameters = (model[:2], model[2:]), list(model.parameters())
        loss = sum(stage(x).sum() for stage in stages for x in rows)
        expected = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
        dist.all_reduce = all_reduce
        begun = holder.begin(schedule)
        for number, action in enumerate(schedule.actions[rank]):
            if action.kind == "B":
                with begun.backward(action):
                    stages[action.stage](rows[rank]).sum().backward()
            begun.after(number)
        dist.all_reduce = begin
        times = sum(action.kind == "B" for action in schedule.actions[rank]) // 2
        gradients = holder.collect()
        for entry, parameter in holder.own:
            torch.testing.assert_close(gradients[entry.name], times * expected[parameter])
        return noted

    for noted in run_ranks(run, 2):
        of_stage_1, of_stage_0 = noted[:4], noted[4:]
        assert all("2.weight" in without for without in of_stage_1[:2]) and "3.weight" not in of_stage_1[1]
        if name == "chimera":  # in GEMS a rank is done with stage 0 first, and waits for its turn
            assert all("0.weight" in without for without in of_stage_0[:2]) and "1.weight" not in of_stage_0[1]
        assert noted[-1] == []


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
