"""After a run that failed, module, optimizer and environment are as if there had been none: the next run is right."""

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel import HybridStrategy, PipelineStrategy, TensorParallelStrategy, ZeROStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import Mlp, row_loader
from tests.trainer.pipelines import LOSS, join_as_torchrun, make_trainer

Make = Callable[[], Any]
OPTIONS = {"use_distributed_sampler": False, "limit_val_batches": 0}


class Breaks(Mlp):
    """Fails in its second step, once; its optimizer is always the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks, self.kept = True, torch.optim.Adam(self.parameters(), lr=0.02)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.breaks and batch_idx == 1:
            raise KeyError("mine")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.kept


def what_is_left(module: Breaks) -> dict[str, Any]:
    """What a library may leave on a module and its optimizer."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return {
        "optimizer": sorted(name for name, value in vars(module.kept).items() if callable(value)),
        "hooks": [p for p in module.parameters() if p._post_accumulate_grad_hooks or p._backward_hooks],
        "module hooks": [m for m in module.modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks],
        "classes": {type(layer) for layer in layers} - {nn.Linear},
        "attributes": {name for layer in layers for name in vars(layer)} - set(vars(nn.Linear(1, 1))),
        "groups": [len(group["params"]) for group in module.kept.param_groups],
    }


def fails(make: Make, ranks: int) -> Breaks:
    """A module whose fit has failed."""
    torch.manual_seed(1)
    module, before = Breaks(), dict(os.environ)
    with pytest.raises(Exception, match="mine"):
        make_trainer(make(), ranks, **OPTIONS).fit(module, row_loader())
    assert dict(os.environ) == before
    module.breaks = False
    return module


def plain(weights: dict[str, Any], state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Weights after three steps under a plain Trainer."""
    module = Breaks()
    module.breaks = False
    module.load_state_dict(weights)
    if state is not None:
        module.kept.load_state_dict(state)
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(variable, None)
    make_trainer("auto", 1, **OPTIONS).fit(module, row_loader())
    return module.state_dict()


def on_ranks(jobs: Sequence[Make], ranks: int, check: Callable[[Make, int, int], Any]) -> None:
    """Run checks one after the other on the same ranks; each has two ports."""

    def on_rank(rank: int, ports: Sequence[int]) -> None:
        warnings.simplefilter("ignore")
        for make, first, second in zip(jobs, ports[::2], ports[1::2], strict=True):
            join_as_torchrun(rank, ranks, first)
            check(make, rank, second)

    run_ranks(on_rank, ranks, [free_port() for _ in range(2 * len(jobs))], group=False, timeout=55.0)


def goes_on(make: Make, rank: int, port: int, ranks: int) -> None:
    """The next fit of the module, with the same optimizer, is one process's from there."""
    module = fails(make, ranks)
    left = what_is_left(module)
    assert not any(left[kind] for kind in left if kind != "groups"), left
    assert left["groups"] == [8]
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    state = copy.deepcopy(module.kept.state_dict()) if ranks == 1 else None
    if ranks > 1:  # which has the states of a part; a new one begins anew, as a new one of one process does
        module.kept = torch.optim.Adam(module.parameters(), lr=0.02)
    join_as_torchrun(rank, ranks, port)
    make_trainer(make(), ranks, **OPTIONS).fit(module, row_loader())
    torch.testing.assert_close(dict(module.state_dict()), dict(plain(weights, state)), **LOSS)


def refuses(make: Make, rank: int, port: int) -> None:
    """Parameters of which other processes had a part raise in words, also in the next fit, until whole ones come."""
    module = fails(make, 2)
    left = what_is_left(module)
    assert not any(left[kind] for kind in left if kind != "groups"), left
    with pytest.raises(ValueError, match=r"the run that divided it has failed.*Load a state dict into the module"):
        module.fc2.weight.sum()
    with pytest.raises(ValueError, match=r"has failed.*Load a state dict into the module"):
        module.state_dict()
    whole = {name: value.clone() for name, value in Breaks().state_dict().items()}
    module.load_state_dict(whole)
    module.kept = torch.optim.Adam(module.parameters(), lr=0.02)
    join_as_torchrun(rank, 2, port)
    after: dict[str, Any] = {}
    trainer = make_trainer(make(), 2, **OPTIONS)
    trainer.fit(module, row_loader())
    after = dict(trainer.strategy.lightning_module_state_dict())
    if rank == 0:
        torch.testing.assert_close(after, dict(plain(whole)), **LOSS)


def deepspeed(stage: int) -> Any:
    return ZeROStrategy(stage=stage, engine="deepspeed")


def test_one_process():
    jobs = [
        lambda: ZeROStrategy(stage=1), lambda: ZeROStrategy(stage=2, bucket_mb=1e-4), lambda: ZeROStrategy(stage=3),
        lambda: ZeROStrategy(stage=2, engine="fsdp2"), lambda: HybridStrategy(zero_stage=3),
        lambda: PipelineStrategy(num_microbatches=2),
    ]  # fmt: skip
    on_ranks(jobs, 1, lambda make, rank, port: goes_on(make, rank, port, 1))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_one_process_under_deepspeed(stage: int):
    pytest.importorskip("deepspeed")
    on_ranks([lambda: deepspeed(stage)], 1, lambda make, rank, port: goes_on(make, rank, port, 1))


def test_two_ranks_with_whole_parameters():
    jobs = [lambda: ZeROStrategy(stage=1), lambda: HybridStrategy(zero_stage=2)]
    on_ranks(jobs, 2, lambda make, rank, port: goes_on(make, rank, port, 2))


DIVIDED = {
    "zero_3": lambda: ZeROStrategy(stage=3),
    "hybrid, once a step": lambda: HybridStrategy(zero_stage=3),
    "hybrid, by block": lambda: HybridStrategy(zero_stage=3, gather="microbatch", blocks=["fc1", "fc2", "fc3", "fc4"]),
    "tensor": lambda: TensorParallelStrategy(tensor_plan={"fc1": "colwise", "fc2": "rowwise"}),
    "deepspeed": lambda: deepspeed(3),
}


@pytest.mark.parametrize("name", [n if n == "zero_3" else pytest.param(n, marks=pytest.mark.slow) for n in DIVIDED])
def test_two_ranks_with_divided_parameters(name: str):
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    on_ranks([DIVIDED[name]], 2, refuses)


def twice(make: Make, ranks: int) -> dict[str, Any]:
    """Weights after two fits of a module whose optimizer is the same object."""
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    module = Breaks()
    module.breaks = False
    for _ in range(2):
        if ranks > 1:
            join_as_torchrun(int(os.environ["RANK"]), ranks, PORTS.pop())
        trainer = make_trainer(make(), ranks, **OPTIONS)
        trainer.fit(module, row_loader())
    return {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


PORTS: list[int] = []
AGAIN = {
    "zero_1": lambda: ZeROStrategy(stage=1, bucket_mb=1e-4),
    "hybrid 2": lambda: HybridStrategy(zero_stage=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_the_same_optimizer_goes_on(name: str):
    """From its states, where the same ranks hold the same parts of them."""
    PORTS[:] = [free_port(), free_port()]
    found = run_ranks(lambda rank: twice(AGAIN[name], 2), 2, group=False, timeout=55.0)[0]
    torch.testing.assert_close(found, twice(lambda: "auto", 1), **LOSS)


@pytest.mark.slow
def test_an_optimizer_whose_states_were_divided_otherwise_is_refused():
    PORTS[:] = [free_port(), free_port()]
    with pytest.raises(Exception, match=r"The states of Adam are divided among the ranks.*resume from a checkpoint"):
        run_ranks(lambda rank: twice(lambda: ZeROStrategy(stage=3), 2), 2, group=False, timeout=55.0)
