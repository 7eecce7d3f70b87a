"""What has been sent is let go of: the memory of a run does not grow with its length."""

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.trainer.modules import Classifier, chain, row_loader
from tests.trainer.pipelines import Case, on_stages


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
