"""Copies of 32 bits of 16-bit parameters, and optimizer states in the host's memory, on a mesh with stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_parallel.checkpoint.sharded import consolidate
from lightning_parallel.strategies import HybridStrategy, ZeROStrategy
from lightning_parallel.zero.optimizer.guarded_state import held_state
from tests.harness import free_port, run_ranks
from tests.trainer.hybrids import Mesh, gpt, gpt_case, on_meshes, token_loader
from tests.trainer.pipelines import BF16, Case, Record, fit, join_as_torchrun

SMALL = {"num_microbatches": 1, "bucket_mb": 1e-3}
MESHES = {
    "stage 1": Mesh(2, 2, 1, {"zero_stage": 1, **SMALL}),
    "stage 2, zb_v": Mesh(2, 2, 1, {"zero_stage": 2, "schedule": "zb_v", **SMALL}),
    "stage 3": Mesh(2, 2, 1, {"zero_stage": 3, **SMALL}),
    "stage 3, block by block, offload": Mesh(
        2, 2, 1, {"zero_stage": 3, "gather": "microbatch", "schedule": "interleaved_1f1b", "offload": True, **SMALL}
    ),
}


def half(epochs: int = 2, **other: Any) -> Case:
    """Epochs of two steps of AdamW that 16 bits would not show."""
    options = {"max_epochs": epochs, "max_steps": -1, "limit_train_batches": 2, "gradient_clip_val": None}
    return gpt_case(precision="bf16-true", **options).but(make=lambda: gpt(learning_rate=1e-4), **other)


def saves(path: Path) -> Any:
    return lambda trainer, module: trainer.save_checkpoint(path)


def zero_on_two_ranks(case: Case) -> list[Record]:
    def run(rank: int, port: int) -> Record:
        join_as_torchrun(rank, 2, port)
        return fit(case.but(loader=lambda: token_loader(2, rank)), ZeROStrategy(stage=1), 2)

    return run_ranks(run, 2, free_port(), group=False, timeout=50.0)


@pytest.mark.slow
def test_copies_of_32_bits_are_zero_strategys_to_the_bit(tmp_path: Path):
    [zero, _] = zero_on_two_ranks(half(at_end=saves(tmp_path / "zero.ckpt")))
    theirs = torch.load(tmp_path / "zero.ckpt", weights_only=False)["master_weights"]
    paths = [tmp_path / f"{number}.ckpt" for number in range(len(MESHES))]
    jobs = [(half(at_end=saves(path)), mesh) for path, mesh in zip(paths, MESHES.values(), strict=True)]
    for name, path, records in zip(MESHES, paths, on_meshes(jobs), strict=True):
        saved = torch.load(path, weights_only=False)
        assert saved["master_weights"].keys() >= theirs.keys(), name
        for key, value in theirs.items():
            torch.testing.assert_close(saved["master_weights"][key], value, rtol=0, atol=0)
            assert torch.equal(saved["state_dict"][key], value.bfloat16()), (name, key)
        for number, fields in zero.optimizers[0]["state"].items():
            for field, value in fields.items():
                assert torch.equal(records[0].optimizers[0]["state"][number][field], value), (name, number, field)


def test_copies_of_32_bits_are_one_processs(tmp_path: Path):
    """By hand: a model of 16 bits on all rows, AdamW on wide copies."""
    torch.manual_seed(1)
    module = gpt(learning_rate=1e-4).bfloat16()
    masters = {name: parameter.detach().float().requires_grad_() for name, parameter in module.named_parameters()}
    twin = gpt(learning_rate=1e-4)
    for name, _ in list(twin.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        twin.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(masters[name].detach())
    twin.head.weight = twin.embedding.weight
    optimizer = twin.configure_optimizers()
    for batch in [*token_loader()][:2] * 2:
        module.zero_grad()
        module._loss(batch).backward()
        for (_, wide), narrow in zip(twin.named_parameters(), module.parameters(), strict=True):
            wide.grad = narrow.grad.float()
        optimizer.step()
        for wide, narrow in zip(twin.parameters(), module.parameters(), strict=True):
            narrow.data.copy_(wide.detach())
    on_meshes([(half(at_end=saves(tmp_path / "mesh.ckpt")), MESHES["stage 2, zb_v"])])
    saved = torch.load(tmp_path / "mesh.ckpt", weights_only=False)["master_weights"]
    for name, value in twin.named_parameters():
        torch.testing.assert_close(saved[name], value.detach(), **BF16)


def places(trainer: Trainer, module: LightningModule) -> set[str]:
    """Where this rank's optimizer states are, and what they are of."""
    partition = trainer.strategy._states.partition
    assert all(bucket.has_copy for bucket in partition.buckets)
    states = held_state(trainer.optimizers[0])
    assert all(segment.dtype == torch.float32 for segment in states)
    return {value.device.type for fields in states.values() for value in fields.values()}


@pytest.mark.slow
def test_offloaded_states_are_on_the_host():
    """On a CPU all is; what can be seen is that there is a copy beside parameters of 32 bits."""
    case = gpt_case(max_steps=2).but(at_end=places)
    mesh = Mesh(2, 2, 1, {"zero_stage": 2, "offload": True, **SMALL})
    assert [record.extra for records in on_meshes([(case, mesh)]) for record in records] == [{"cpu"}] * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_copies_of_32_bits_are_resumed_on_another_mesh(tmp_path: Path, kind: str):
    path, mesh = tmp_path / "half", MESHES["stage 2, zb_v"]
    options = {**MESHES["stage 3, block by block, offload"].options, "state_dict_type": kind}
    whole, _ = on_meshes([(half(), mesh), (half(1, at_end=saves(path)), Mesh(2, 2, 1, options))])
    [resumed] = on_meshes([(half(checkpoint=path), mesh)])
    if kind == "sharded":
        consolidate(path, tmp_path / "whole.ckpt", weights_only=False)
        assert (
            torch.load(tmp_path / "whole.ckpt", weights_only=False)["state_dict"]["norm.weight"].dtype == torch.float32
        )
    for name, value in whole[0].weights.items():
        assert torch.equal(resumed[0].weights[name], value), name
    for number, fields in whole[0].optimizers[0]["state"].items():
        for field, value in fields.items():
            assert torch.equal(resumed[0].optimizers[0]["state"][number][field], value), (number, field)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": True}, "offload is False, or True with zero_stage"),
        ({"zero_stage": 1, "master_weights": 1}, "master_weights is True or False"),
    ],
)
def test_arguments_that_do_not_go_together(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        HybridStrategy(**options)
