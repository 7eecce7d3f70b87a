"""A stage that is built without memory is made and divided block by block: no rank ever holds it whole."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_parallel import load_weights
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from tests.trainer.hybrids import Mesh, assert_one_process, gpt, gpt_case, on_meshes
from tests.trainer.pipelines import Record, one_process

BLOCKS = 8


class Late(LightningModule):
    """Builds its layers in `configure_model`, and counts bytes of parameters whenever one of its products is made."""

    training_step, validation_step, configure_optimizers, _loss, forward = (
        GPT.training_step, GPT.validation_step, GPT.configure_optimizers, GPT._loss, GPT.forward,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = None
        self.counts: list[int] = []

    def configure_model(self) -> None:
        if self.blocks is None:
            built = gpt(num_blocks=BLOCKS)
            self.context, self.explicit_mask, self.learning_rate = built.context, True, 1e-3
            for name, child in built.named_children():
                setattr(self, name, child)
            for block in self.blocks:
                block.down.reset_parameters = lambda layer=block.down: self.made(layer)

    def made(self, layer: nn.Linear) -> None:
        nn.Linear.reset_parameters(layer)
        with torch._C.DisableTorchFunctionSubclass():
            own = [
                p.untyped_storage()
                for p in self.parameters()
                if isinstance(p, nn.Parameter) and not isinstance(p, ForeignParameter) and not p.is_meta
            ]
            self.counts.append(sum({storage._cdata: storage.nbytes() for storage in own}.values()))


class LateSGD(Late):
    """A bias of keys has no gradient but rounding, which AdamW makes a step of."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LateMeta(LateSGD):
    """Says itself that its layers have no memory: a mesh of a tensor axis alone builds them as one process does."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            super().configure_model()


class Loaded(Late):
    """Loads its weights where it builds its layers."""

    path: Any = None

    def configure_model(self) -> None:
        if self.blocks is None:
            super().configure_model()
            load_weights(self, self.path)


def counts(trainer: Trainer, module: Late) -> tuple[list[int], int, int]:
    own = [(entry.name, p.nbytes) for entry, p in trainer.strategy.pipeline.own]
    return module.counts, sum(n for name, n in own if name.startswith("blocks.")), sum(n for _, n in own)


ZERO = {"zero_stage": 3, "gather": "microbatch"}


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(2, 2, 1, {**ZERO, "schedule": "zb_v"}),
        pytest.param(Mesh(1, 2, 2), marks=pytest.mark.slow),
        pytest.param(Mesh(1, 1, 2), marks=pytest.mark.slow),
        pytest.param(Mesh(2, 1, 1, {"zero_stage": 3}), marks=pytest.mark.slow),
        pytest.param(Mesh(2, 1, 2, ZERO), marks=pytest.mark.slow),
    ],
    ids=["microbatch", "tensor", "tensor alone", "step", "microbatch, tensor"],
)
def test_a_stage_without_memory_is_never_whole(mesh: Mesh):
    make = LateMeta if mesh.size == mesh.tensor else LateSGD
    case = gpt_case().but(make=make, at_end=counts)
    [records] = on_meshes([(case, mesh)])
    assert_never_whole(records, mesh)
    reference = one_process(case.but(make=LateSGD, initial=records[0].initial, at_end=None))
    assert_one_process(records, reference, mesh)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(2, 1, 1, {"zero_stage": 3}), marks=pytest.mark.slow),
        Mesh(1, 2, 2),
        pytest.param(Mesh(2, 1, 2, ZERO), marks=pytest.mark.slow),
    ],
    ids=["step", "tensor", "microbatch, tensor"],
)
def test_nor_is_it_where_weights_are_loaded(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = gpt(num_blocks=BLOCKS).state_dict()
    torch.save(state, tmp_path / "weights.pt")
    monkeypatch.setattr(Loaded, "path", tmp_path / "weights.pt")
    [records] = on_meshes([(gpt_case(max_steps=1).but(make=Loaded, at_end=counts), mesh)])
    assert_never_whole(records, mesh)
    assert all(torch.equal(records[0].initial[name], value) for name, value in state.items())


def assert_never_whole(records: Sequence[Record], mesh: Mesh) -> None:
    """A rank held its parts of the blocks before, one block, what lies outside, and padding.

    Blocks are cut over the tensor axis product by product: of the last product (64 to 16 features) it held the whole.
    """
    for record in records:
        seen, blocks, whole = record.extra
        held = BLOCKS // mesh.pipeline
        assert len(seen) == held
        outside, product = (whole - blocks) * mesh.tensor, 64 * 16 * 4 * (1 - 1 / mesh.tensor)
        for number, nbytes in enumerate(seen):
            before = number / mesh.data * blocks / held
            assert nbytes <= before + blocks / held + product + outside + 64 * (number + 1)
