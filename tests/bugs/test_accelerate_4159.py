"""Schedule-free optimizers have `train()` and `eval()`, which move the weights: wrapped optimizers left them without
effect. The kind: whatever of an optimizer is neither `step` nor `zero_grad`, and its state, read or written in hooks.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel import HybridStrategy, ParameterServerStrategy, PipelineStrategy, ZeROStrategy
from tests.trainer.modules import Classifier
from tests.trainer.optimizers import BlockAdam, Columns, Lookahead, ScheduleFree
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import Fit, fit, on_ranks

OPTIONS: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False, "check_val_every_n_epoch": 1}
Make = Callable[[], Any]


def deepspeed(stage: int = 2) -> Any:
    pytest.importorskip("deepspeed")
    return ZeROStrategy(stage=stage, engine="deepspeed")


DIVIDE: dict[str, Make] = {
    "zero_1": lambda: ZeROStrategy(stage=1, bucket_mb=1e-4),
    "zero_2": lambda: ZeROStrategy(stage=2),
    "zero_3": lambda: ZeROStrategy(stage=3),
    "hybrid 1": lambda: HybridStrategy(zero_stage=1),
    "hybrid 3": lambda: HybridStrategy(zero_stage=3),
    "hybrid 3 by block": lambda: HybridStrategy(zero_stage=3, gather="microbatch"),
    "pipeline": lambda: PipelineStrategy(num_microbatches=2),
}
CHEAP = ("zero_1", "hybrid 3", "pipeline")
EACH = [n if n in CHEAP else pytest.param(n, marks=pytest.mark.slow) for n in DIVIDE]


class Free(Classifier):
    """Switches its optimizer where a schedule-free one is to be switched."""

    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters())

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        if self.trainer.optimizers:
            self.optimizers().eval()

    def on_validation_epoch_end(self) -> None:
        if self.trainer.optimizers:
            self.trainer.optimizers[0].train()


class Wrapped(Classifier):
    """An optimizer that holds another, whose groups and states are its own."""

    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.Adam(self.parameters(), lr=0.02))


class Forgets(Classifier):
    """A hook that resets the optimizer, by another mapping or by clearing it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].state = defaultdict(dict)


class Clears(Forgets):
    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].state.clear()


def assert_one_process(make: type[Classifier], name: str, **options: Any) -> None:
    run = Fit(make, {**OPTIONS, **options})
    reference = fit(run, "auto", 1)
    [results] = on_ranks([(run, DIVIDE[name])], 2)
    torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
    torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
    torch.testing.assert_close(results[0].metrics, reference.metrics, **LOSS, check_dtype=False)
    torch.testing.assert_close(results[0].optimizers[0]["state"], reference.optimizers[0]["state"], **WEIGHTS)


@pytest.mark.parametrize("name", EACH)
def test_methods_of_an_optimizer_run_on_what_a_rank_holds(name: str):
    assert_one_process(Free, name)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Wrapped, Forgets, Clears])
@pytest.mark.parametrize("name", DIVIDE)
def test_states_that_are_replaced_or_shared(name: str, make: type[Classifier]):
    if name.startswith("hybrid") and make is Wrapped:
        pytest.skip("Lightning wraps what holds no step of its own")
    assert_one_process(make, name)


class Reads(Classifier):
    """A hook that reads the optimizer's state in some way."""

    read: Callable[[Any], Any]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        type(self).read(self.trainer.optimizers[0])


def reads(read: Callable[[Any], Any]) -> type[Reads]:
    return type("Reads", (Reads,), {"read": staticmethod(read)})


READS: dict[str, Callable[[Any], Any]] = {
    "len": lambda optimizer: len(optimizer.state),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "items": lambda optimizer: [p.shape for p, state in optimizer.state.items()],
    "truth": lambda optimizer: bool(optimizer.state),
    "moments": lambda optimizer: sum(float(s["exp_avg"].norm()) for s in optimizer.state.values()),
}
REFUSE: dict[str, tuple[Make, str]] = {
    "zero_1": (DIVIDE["zero_1"], "The states of Adam are divided among the ranks"),
    "hybrid 1": (DIVIDE["hybrid 1"], "The states of Adam are divided among the ranks"),
    "pipeline": (DIVIDE["pipeline"], "The states of Adam are in several processes"),
    "servers": (lambda: ParameterServerStrategy(start_method="fork"), "The states of Adam are on the servers"),
    "deepspeed": (deepspeed, "the states of Adam are those of DeepSpeed's vectors"),
}


@pytest.mark.parametrize("read", ["len", *(pytest.param(r, marks=pytest.mark.slow) for r in READS if r != "len")])
@pytest.mark.parametrize("name", ["zero_1", *(pytest.param(n, marks=pytest.mark.slow) for n in list(REFUSE)[1:])])
def test_states_of_a_part_are_not_taken_for_all(name: str, read: str):
    make, words = REFUSE[name]
    with pytest.raises(Exception, match=r"Call trainer.strategy.optimizer_state") as caught:
        on_ranks([(Fit(reads(READS[read]), {**OPTIONS, "max_epochs": 1}), make)], 2)
    assert words in str(caught.value)


class Asks(Classifier):
    """What the words say: all ranks ask for the state, and rank 0 gets one process's."""

    found: Any = None

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found = self.trainer.strategy.optimizer_state(self.trainer.optimizers[0])


@pytest.mark.parametrize("name", EACH)
def test_the_remedy_gives_one_process_s_state(name: str):
    run = Fit(Asks, {**OPTIONS, "max_epochs": 1}, after=lambda trainer, module: module.found.get("state"))
    reference = fit(run, "auto", 1)
    [results] = on_ranks([(run, DIVIDE[name])], 2)
    torch.testing.assert_close(results[0].extra, reference.extra, **WEIGHTS)


class OneRank(Classifier):
    """On one rank everything is there."""

    seen: Any = None

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        moments = [optimizer.state[p]["exp_avg"].clone() for p in self.parameters()]
        self.seen = [len(optimizer.state), moments, list(optimizer.state_dict()["state"])]


@pytest.mark.parametrize("stage", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_one_rank_has_one_process_s_state(stage: int):
    run = Fit(OneRank, {**OPTIONS, "max_epochs": 1}, after=lambda trainer, module: module.seen)
    reference = fit(run, "auto", 1)
    [[result]] = on_ranks([(run, lambda: ZeROStrategy(stage=stage))], 1)
    seen = [[getattr(m, "full_tensor", lambda m=m: m)() for m in part] if isinstance(part, list) and part and
            isinstance(part[0], Tensor) else part for part in result.extra]  # fmt: skip
    torch.testing.assert_close(seen, reference.extra, **WEIGHTS)


@pytest.mark.slow
def test_deepspeed_refuses_methods():
    with pytest.raises(
        Exception, match=r'ScheduleFree\.train would not see the weights that train. Use engine="native"'
    ):
        on_ranks([(Fit(Free, OPTIONS), deepspeed)], 2)


class Blocky(Classifier):
    def configure_optimizers(self) -> Any:
        return BlockAdam(self.parameters())


class OfColumns(Classifier):
    def configure_optimizers(self) -> Any:
        return Columns(self.parameters())


WORDS = r"got \w+, whose state `absmax` has shape \(\d+,\).* HybridStrategy\(zero_stage=0\), which divides no states"


@pytest.mark.parametrize("name", ["zero_1", *(pytest.param(n, marks=pytest.mark.slow) for n in list(DIVIDE)[1:6])])
def test_states_that_are_not_of_elements_are_refused_at_the_first_step(name: str):
    kind = OfColumns if name == "zero_3" else Blocky  # FSDP2's pieces are rows, not flat
    make = type("Counts", (kind,), {"on_train_batch_end": lambda self, *_: pytest.fail("a step was over")})
    with pytest.raises(Exception, match=WORDS):
        on_ranks([(Fit(make, OPTIONS), DIVIDE[name])], 2)


@pytest.mark.parametrize("make", [
    lambda: HybridStrategy(zero_stage=0), pytest.param(DIVIDE["pipeline"], marks=pytest.mark.slow),
])  # fmt: skip
def test_they_run_where_parameters_are_whole(make: Make):
    run = Fit(Blocky, OPTIONS)
    reference = fit(run, "auto", 1)
    [results] = on_ranks([(run, make)], 2)
    torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
    torch.testing.assert_close(results[0].optimizers[0]["state"], reference.optimizers[0]["state"], **WEIGHTS)
