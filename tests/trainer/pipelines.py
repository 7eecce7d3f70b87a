"""Whole Trainer runs as a pipeline on forked ranks, and the same run in one process to compare them with.

A ``Case`` says what is run, ``one_process(case)`` runs it under a plain Trainer, ``on_stages(case, 2)`` on two ranks
that find each other as torchrun's do. Both give ``Record``s: the loss of every step, what was logged at the end of
every step, all weights, the optimizer's state. ``assert_parity`` compares them.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel.secret import SECRET
from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, run_ranks, said_by

# Sums over rows are taken micro-batch by micro-batch, in another order than one process takes them: float32 rounding
# (6e-8) of values around 1, after a few steps.
LOSS = {"rtol": 2e-5, "atol": 2e-6}
WEIGHTS = {"rtol": 2e-5, "atol": 2e-6}
# bf16 keeps 8 bits (4e-3), and a micro-batch rounds at other places than a batch.
BF16 = {"rtol": 2e-2, "atol": 2e-3}
HALF = {"rtol": 5e-3, "atol": 1e-3}  # float16 keeps 11 bits (5e-4)

Init = Mapping[str, Tensor]
Options = Mapping[str, Any]
Tolerance = Mapping[str, float]


@dataclass(frozen=True)
class Case:
    """What is run.

    Args:
        make: builds the module.
        loader: builds the training loader; also the validation loader unless one is given.
        strategy: arguments of `PipelineStrategy`.
        trainer: arguments of `Trainer`.
        validation, validate: builds the validation loader; whether to validate at all.
        at_end: called with trainer and module in `on_train_end`; its result lands in `Record.extra`.
        after: the same when `fit` has ended.
        initial: a state dict to begin with, for modules that `configure_model` builds.
        checkpoint: where to resume from.
    """

    make: Callable[[], LightningModule]
    loader: Callable[[], DataLoader]
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    validation: Callable[[], DataLoader] | None = None
    validate: bool = True
    at_end: Callable[[Trainer, LightningModule], Any] | None = None
    after: Callable[[Trainer, LightningModule], Any] | None = None
    initial: Init | None = None
    checkpoint: Any = None
    seed: int = 1

    def but(
        self, strategy: Mapping[str, Any] | None = None, trainer: Mapping[str, Any] | None = None, **other
    ) -> "Case":
        """The same with some arguments changed."""
        return replace(
            self, strategy={**self.strategy, **(strategy or {})}, trainer={**self.trainer, **(trainer or {})}, **other
        )  # fmt: skip


@dataclass
class Record:
    """What became of a run on one rank. The whole model's state exists on rank 0 only."""

    losses: list[Tensor] = field(default_factory=list)
    metrics: list[dict[str, Tensor]] = field(
        default_factory=list
    )  # callback, progress bar and logged, after every step
    initial: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)  # the parameters that this rank's stage holds
    extra: Any = None


class Recorder(Callback):
    """Fills a `Record`."""

    def __init__(self, at_end: Callable[[Trainer, LightningModule], Any] | None = None) -> None:
        self.record, self.at_end = Record(), at_end

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.record.initial = trainer.strategy.lightning_module_state_dict()
        self.record.initial = {k: v.clone() for k, v in self.record.initial.items() if isinstance(v, Tensor)}

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.record.losses.append(outputs["loss"].detach().cpu().clone())
        self.record.metrics.append(all_metrics(trainer))
        self.record.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.record.weights = {k: v.detach().clone() for k, v in state.items() if isinstance(v, Tensor)}
        self.record.optimizers = [trainer.strategy.optimizer_state(o) for o in trainer.optimizers]
        if isinstance(trainer.strategy, PipelineStrategy):
            with getattr(trainer.strategy, "whole_parameters", nullcontext)():
                whole = trainer.strategy.tensor.whole
                self.record.own = {e.name: whole(e.name, p.detach()).clone() for e, p in trainer.strategy.pipeline.own}
        if self.at_end is not None:
            self.record.extra = self.at_end(trainer, module)


def all_metrics(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that was logged so far, as callbacks, progress bar and loggers see it."""
    kinds = {
        "callback": trainer.callback_metrics,
        "bar": trainer.progress_bar_metrics,
        "logged": trainer.logged_metrics,
    }
    return {f"{kind}/{key}": torch.as_tensor(value).clone() for kind, of in kinds.items() for key, value in of.items()}


def make_trainer(strategy: Any, devices: int, callbacks: Sequence[Callback] = (), **options: Any) -> Trainer:
    """A quiet Trainer of three steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "log_every_n_steps": 1, "max_steps": 3, "num_sanity_val_steps": 0,
    }  # fmt: skip
    if "max_epochs" in options:
        quiet["max_steps"] = -1
    return Trainer(**{**quiet, **options}, strategy=strategy, devices=devices, callbacks=list(callbacks))


SECRET_OF_TESTS = {SECRET: "the secret of ranks that somebody else starts"}


def join_as_torchrun(rank: int, world_size: int, port: int) -> None:
    """Make this process a rank of a run that torchrun started."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests",
        **SECRET_OF_TESTS,
    )  # fmt: skip


def fit(case: Case, strategy: Any, devices: int) -> Record:
    """One run in this process."""
    torch.manual_seed(case.seed)
    module, recorder = case.make(), Recorder(case.at_end)
    if case.initial is not None:
        module.configure_model()
        module.load_state_dict(case.initial)
    options = {**({} if case.validate else {"limit_val_batches": 0}), **case.trainer}
    more = options.pop("callbacks", lambda: [])()
    trainer = make_trainer(strategy, devices, [recorder, *more], **options)
    trainer.fit(module, case.loader(), (case.validation or case.loader)(), ckpt_path=case.checkpoint)
    recorder.record.final = all_metrics(trainer)
    if case.after is not None:
        recorder.record.extra = case.after(trainer, module)
    return recorder.record


def one_process(case: Case) -> Record:
    """The run under a plain Trainer on one device."""
    return fit(case, "auto", 1)


def on_stages(case: Case, num_stages: int, **options: Any) -> list[Record]:
    """The run as a pipeline; one record a rank."""
    return many_on_stages([case], num_stages, **options)[0]


def many_on_stages(cases: Sequence[Case], num_stages: int, timeout: float = 50.0) -> list[list[Record]]:
    """Several runs one after the other on the same ranks; for each case one record a rank."""

    def run(rank: int, port: int) -> list[Record]:
        join_as_torchrun(rank, num_stages, port)
        return [fit(case, PipelineStrategy(**{"num_microbatches": 4, **case.strategy}), num_stages) for case in cases]

    results = run_ranks(run, num_stages, free_port(), group=False, timeout=timeout)
    return [list(records) for records in zip(*results, strict=True)]


def failure_of(case: Case, num_stages: int = 2, whole: bool = False) -> str:
    """The text of the user's or the library's exception that ends a run, without what its notes say (`whole`)."""
    with pytest.raises(Exception) as caught:
        on_stages(case, num_stages)
    return said_by(caught.value) if whole else str(caught.value)


def assert_parity(
    case: Case, stages: Sequence[int] = (2, 4), loss: Tolerance = LOSS, weights: Tolerance = WEIGHTS,
    leave_out: Mapping[str, slice] | None = None,
) -> list[Record]:  # fmt: skip
    """Compare runs with so many stages with one process; returns rank 0's records.

    ``leave_out`` names slices of parameters that are not compared; say why where it is used.
    """
    reference, found = one_process(case), []
    for num_stages in stages:
        records = on_stages(case, num_stages)
        assert_same(records, reference, loss, weights, leave_out)
        found.append(records[0])
    return found


def assert_same(
    records: Sequence[Record], reference: Record, loss: Tolerance = LOSS, weights: Tolerance = WEIGHTS,
    leave_out: Mapping[str, slice] | None = None,
) -> None:  # fmt: skip
    """Every rank logged the same, and what one process logs; losses, weights and optimizer state are one process's."""
    assert_ranks_agree(records)
    first = records[0]
    assert len(first.losses) == len(reference.losses) > 0
    torch.testing.assert_close(torch.stack(first.losses), torch.stack(reference.losses), **loss)
    for ours, theirs in zip([*first.metrics, first.final], [*reference.metrics, reference.final], strict=True):
        _assert_close(ours, theirs, {"rtol": max(loss["rtol"], 1e-6), "atol": max(loss["atol"], 1e-7)}, "metric")
    assert first.lrs == reference.lrs
    _assert_close(first.weights, reference.weights, weights, "weight", leave_out)
    for ours, theirs in zip(first.optimizers, reference.optimizers, strict=True):
        assert_same_optimizer(ours, theirs, weights)


def assert_ranks_agree(records: Sequence[Record]) -> None:
    """The losses and everything logged after every step are the same bits on every rank."""
    first = records[0]
    for other in records[1:]:
        assert torch.equal(torch.stack(other.losses), torch.stack(first.losses))
        for ours, theirs in zip([*other.metrics, other.final], [*first.metrics, first.final], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours), (ours, theirs)


def assert_same_optimizer(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: Mapping[str, float]) -> None:
    """The same groups, numbering and state."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert ours["state"][index].keys() == state.keys()
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        _assert_close({k: ours["state"][index][k] for k in tensors}, tensors, tolerance, f"state of parameter {index}")
        rest = {k: v for k, v in state.items() if k not in tensors}
        lists = {k: v for k, v in rest.items() if isinstance(v, list)}  # L-BFGS's
        for name, values in lists.items():
            torch.testing.assert_close(ours["state"][index][name], values, **tolerance)
        for name in rest.keys() - lists.keys():
            assert ours["state"][index][name] == pytest.approx(rest[name], rel=tolerance["rtol"]), name


def _assert_close(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: Mapping[str, float], what: str,
    leave_out: Mapping[str, slice] | None = None,
) -> None:  # fmt: skip
    assert list(ours) == list(theirs), f"{what}s {list(ours)}, one process has {list(theirs)}"
    for name, value in theirs.items():
        mine, value = ours[name].clone(), value.clone()
        for suffix, rows in (leave_out or {}).items():
            if name.endswith(suffix):
                mine[rows] = value[rows]
        say = lambda text, name=name: f"{what} {name}: {text}"  # noqa: E731
        torch.testing.assert_close(mine, value, **tolerance, check_dtype=what != "metric", msg=say)
