"""What has been sent is let go of: the memory of a run does not grow with its length."""

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.trainer.modules import WIDTH, Classifier, chain, row_loader
from tests.trainer.pipelines import Case, assert_parity, on_stages


class Remembers(Classifier):
    """Remembers, without keeping them, all block outputs of a run and the gradients of block inputs."""

    def __init__(self) -> None:
        super().__init__(chain(8))
        self.made: list[StorageWeakRef] = []
        for block in self.net:
            block.register_forward_hook(self.note)

    def note(self, block: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.made.append(StorageWeakRef(output.untyped_storage()))
        if output.requires_grad:
            output.register_hook(lambda gradient: self.made.append(StorageWeakRef(gradient.untyped_storage())))


def test_what_was_sent_is_freed_a_step_later():
    steps, microbatches = 20, 4

    def alive(trainer: Any, module: Remembers) -> tuple[int, int]:
        return len(module.made), sum(not made.expired() for made in module.made)

    case = Case(
        Remembers,
        lambda: row_loader([8] * steps),
        {"num_microbatches": microbatches},
        {"max_steps": steps},
        validate=False,
        at_end=alive,
    )
    for rank, record in enumerate(on_stages(case, 2)):
        made, left = record.extra
        assert made > steps * microbatches * 8  # outputs and gradients of this rank's blocks
        assert left <= 2 * microbatches + 2, f"rank {rank} keeps {left} of {made} tensors alive"


class Recurrent(nn.Module):
    """A block that is an LSTM, which keeps its weights in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x[:, None])[0][:, 0]


class Weighs(Classifier):
    """Remembers, without keeping it, the memory of every parameter that it was made with."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(Recurrent() for _ in range(4))))
        self.made = [(name, StorageWeakRef(p.untyped_storage()), p.nbytes) for name, p in self.named_parameters()]


def test_the_weights_of_other_stages_are_freed_where_a_module_lists_them_too():
    def held(trainer: Any, module: Weighs) -> tuple[int, int]:
        own = {name for entry, _ in trainer.strategy.pipeline.own for name in entry.names}
        mine = sum(nbytes for name, _, nbytes in module.made if name in own)
        return mine, sum(nbytes for _, memory, nbytes in module.made if not memory.expired())

    case = Case(Weighs, row_loader, trainer={"max_epochs": 1}, at_end=held, validate=False)
    for record in on_stages(case, 2):
        mine, alive = record.extra
        assert alive == mine == 2 * 4 * (2 * 4 * WIDTH * WIDTH + 2 * 4 * WIDTH)  # two LSTMs of float32
    assert_parity(Case(Weighs, row_loader, validate=False), stages=(2,))
