"""What blocks leave behind beside their result, and modules that run at odd moments: refused in words, or as before."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.trainer.modules import CLASSES, WIDTH, Classifier, Mlp, chain, row_loader
from tests.trainer.pipelines import Case, assert_parity, assert_same, failure_of, many_on_stages, one_process

CUT = {"blocks": ["fc1", "fc2", "fc3", "fc4"]}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def compiled_in_place() -> Classifier:
    module = Classifier(Inner())
    module.net.compile(backend="eager")
    return module


class Routes(nn.Module):
    """Appends an auxiliary loss to a list that others hold too."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(WIDTH, WIDTH), seen

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.seen.append(y.square().mean())
        return torch.tanh(y)


class SumsAList(Classifier):
    def __init__(self) -> None:
        self_seen: list[Tensor] = []
        super().__init__(nn.Sequential(*(Routes(self_seen) for _ in range(4)), nn.Linear(WIDTH, CLASSES)))
        self.seen = self_seen

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.clear()
        loss = self.loss(batch)
        return loss + sum(self.seen)


class SumsWhatAHookSaw(Classifier):
    """A hook on a layer inside each block."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)), chain(1))
        )
        self.seen: list[Tensor] = []
        self.collect()

    def collect(self) -> None:
        for block in self.net[:4]:
            block[0].register_forward_hook(lambda module, args, output: self.seen.append(output.square().mean()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.clear()
        loss = self.loss(batch)
        assert len(self.seen) == 4  # as in one process, on the stage that sees them all
        return loss + sum(self.seen)


class ChecksCallsAgain(Mlp):
    """Checkpoints a function that calls a module twice."""

    keeps_random_state = True

    def forward(self, x: Tensor) -> Tensor:
        options = {"use_reentrant": False, "preserve_rng_state": self.keeps_random_state}
        h = checkpoint(lambda x: self.fc1(x) + self.fc1(-x), x, **options)
        return self.fc4(self.fc3(self.fc2(h)))


class ChecksCallsWithoutRandomState(ChecksCallsAgain):
    keeps_random_state = False


class Reads(nn.Module):
    """A block that reads a table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + table)


class NamesLate(Classifier):
    """A table that is registered behind the blocks that read its weight."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Reads() for _ in range(4)))
        self.table, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net:
            x = block(x, self.table.weight)
        return self.head(x)


class HooksLate(SumsWhatAHookSaw):
    """Begins to collect in the second batch."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net[:4]:
            block[0]._forward_hooks.clear()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.collect()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + sum(self.seen)


REFUSED = [
    (compiled_in_place, "`net` is compiled as a whole, and the pipeline cuts it into net.blocks.0, ... . Compile the"),
    (SumsAList, "The step returns a value computed from `seen` set beside the output of `net.1` (stage 0), whose data"),
    (SumsWhatAHookSaw, "The step returns a value computed from the output of `net.0.0` (stage 0), whose data stage 1"),
    (
        ChecksCallsWithoutRandomState,
        "A recomputation calls `fc1` (stage 0), which the step calls more than once: which call it",
    ),
    (HooksLate, "A forward hook on `net.0.0` of stage 0 was registered after that stage had said what its hooks see."),
    (NamesLate, 'Move its module with stages={"table": 0}.'),
]


@pytest.mark.parametrize(("make_module", "text"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused(make_module: Any, text: str):
    options = CUT if isinstance(make_module, type) and issubclass(make_module, Mlp) else {}
    assert text in failure_of(Case(make_module, row_loader, options, validate=False))


def test_calls_of_a_module_within_one_recomputation_are_told_apart():
    assert_parity(Case(ChecksCallsAgain, row_loader, CUT), stages=(2,))


class Watches(SumsWhatAHookSaw):
    """Collects from layers inside all blocks, and uses nothing of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.clear()
        return self.loss(batch)


class Times(SumsWhatAHookSaw):
    """Two hooks on every module, of which the second needs what the first did, as those of Lightning's profiler."""

    def collect(self) -> None:
        self.begun: dict[str, int] = {}
        prune.l1_unstructured(self.net[1][0], "weight", 0.5)  # makes the weight in a hook before the forward
        for name, part in self.net.named_modules():
            part.register_forward_pre_hook(lambda module, args, name=name: self.begun.update({name: 1}))
            part.register_forward_hook(lambda module, args, output, name=name: self.seen.append(self.begun.pop(name)))

    training_step = Watches.training_step


def test_what_is_collected_and_not_used_and_a_module_that_was_moved_are_as_in_one_process():
    moved = Case(NamesLate, row_loader, {"stages": {"table": 0}})
    cases = [Case(Watches, row_loader), Case(Times, row_loader), moved]
    for num_stages in (2, 4):
        for case, records in zip(cases, many_on_stages(cases, num_stages), strict=True):
            assert_same(records, one_process(case))
