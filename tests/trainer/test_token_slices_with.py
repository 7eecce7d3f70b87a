"""What TeraPipe goes with: recomputation, parts of states along the data axis, a tensor axis."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.callbacks import MemoryMonitor
from lightning_parallel.demo import GPT
from tests.trainer.architectures import DECODER, placed_texts, tiny
from tests.trainer.hybrids import Mesh, assert_one_process, gpt_case, on_meshes
from tests.trainer.hybrids import gpt as gpt_of_mesh
from tests.trainer.pipelines import assert_same, failure_of, many_on_stages, on_stages, one_process
from tests.trainer.test_parity import KEY_BIAS, gpt
from tests.trainer.test_token_slices import assert_sliced, case, last_schedule
from tests.trainer.test_token_slices_attention import Encoders

BLOCK = {"recompute": "block"}


# -- recomputation -----------------------------------------------------------------------------------------------------


def test_blocks_that_are_computed_again_are_one_process():
    run = case(gpt, **BLOCK)
    records = on_stages(run, 2)
    assert_same(records, one_process(run), leave_out=KEY_BIAS)
    assert_sliced(records)


MODELS: dict[str, Any] = {
    "without a mask": case(lambda: gpt(explicit_mask=False), **BLOCK),
    "attention modules": case(Encoders, **BLOCK),
    "padded llama": case(tiny("LlamaForCausalLM", "LlamaConfig", DECODER), placed_texts, **BLOCK),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_causal_models_are_one_process(name):
    records = on_stages(MODELS[name], 4)
    assert_same(records, one_process(MODELS[name]), leave_out=KEY_BIAS)
    assert_sliced(records)


@pytest.mark.slow
def test_dropout_drops_the_same_when_it_is_computed_again():
    run = case(lambda: gpt(dropout=0.2))
    first, again = many_on_stages([run, run.but(BLOCK)], 2)
    assert_same(again, first[0], leave_out=KEY_BIAS)


class Checkpointed(GPT):
    """The step calls its blocks by torch's own checkpoint."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def checkpointed() -> GPT:
    return Checkpointed(vocabulary=11, context=16, width=16, num_heads=2, num_blocks=4)


class InBlocks(GPT):
    """Blocks checkpoint their attention, and draw in it."""

    def on_train_start(self) -> None:
        for block in self.blocks:
            block._attend = partial(checkpoint, block._attend, use_reentrant=False)


def in_blocks(**options: Any) -> GPT:
    return InBlocks(vocabulary=11, context=16, width=16, num_heads=2, num_blocks=4, **options)


CHECKPOINTS: dict[str, Any] = {
    "around blocks": case(checkpointed),
    "in blocks": case(in_blocks),
    "llama": case(tiny("LlamaForCausalLM", "LlamaConfig", DECODER, checkpointing=True), placed_texts),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # transformers 5
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_of_ones_own_are_one_process(name):
    records = on_stages(CHECKPOINTS[name], 2)
    assert_same(records, one_process(CHECKPOINTS[name]), leave_out=KEY_BIAS)
    assert_sliced(records)


@pytest.mark.slow
def test_a_checkpoint_in_a_block_that_is_computed_again_is_refused():
    words = "Block `blocks.0` is computed again as a whole, and holds a checkpoint of its own"
    assert words in failure_of(case(in_blocks, **BLOCK))


@pytest.mark.slow
def test_a_checkpoint_in_a_block_draws_the_same_again():
    plain, again = many_on_stages([case(lambda: gpt(dropout=0.2)), case(lambda: in_blocks(dropout=0.2))], 2)
    assert_same(again, plain[0], leave_out=KEY_BIAS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["by recompute", "by the step"])
def test_what_is_computed_again_is_not_held(how):
    run = case(lambda: gpt(explicit_mask=False)).but(
        trainer={"callbacks": lambda: [MemoryMonitor()], "accumulate_grad_batches": 1}, validate=False
    )
    other = run.but(BLOCK) if how == "by recompute" else replace(run, make=checkpointed)
    held, kept_less = many_on_stages([run, other], 2)
    for rank in (0, 1):
        key = f"logged/parallel/memory_activations_peak/rank_{rank}"
        assert kept_less[rank].metrics[-1][key] < 0.5 * held[rank].metrics[-1][key]


# -- meshes ------------------------------------------------------------------------------------------------------------

SLICES = {"schedule": "terapipe", "slices": 3, "bucket_mb": 1e-3}
MESHES: dict[str, Mesh] = {
    "stage 1": Mesh(2, 2, 1, {**SLICES, "zero_stage": 1}),
    "stage 2": Mesh(2, 2, 1, {**SLICES, "zero_stage": 2}),
    "stage 2, offloaded, computed again": Mesh(2, 2, 1, {**SLICES, **BLOCK, "zero_stage": 2, "offload": True}),
    "stage 3": Mesh(2, 2, 1, {**SLICES, "zero_stage": 3}),
    "tensor": Mesh(1, 2, 2, SLICES),
    "tensor, parts of inputs": Mesh(1, 2, 2, {**SLICES, **BLOCK, "partition_activations": True}),
    "tensor, the loss in parts": Mesh(1, 2, 2, {**SLICES, "loss_parallel": True, "overlap_sums": True}),
}


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("axis", ["stage", "tensor"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_meshes_are_one_process(axis, accumulate):
    """Gradients that leave while backwards run, and those that accumulate."""
    run = replace(gpt_case(accumulate_grad_batches=accumulate), at_end=last_schedule)
    reference = one_process(run)
    meshes = [mesh for name, mesh in MESHES.items() if name.startswith(axis)]
    for mesh, records in zip(meshes, on_meshes([(run, mesh) for mesh in meshes], timeout=120.0), strict=True):
        assert_one_process(records, reference, mesh)
        assert_sliced(records)


class ReadsEmbedding(nn.Module):
    """A block that reads the embedding, too."""

    def __init__(self, block: nn.Module, embedding: nn.Module) -> None:
        super().__init__()
        self.block, self.embedding = block, embedding

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.block(x + self.embedding.weight[0], mask)


def read_twice() -> GPT:
    """One parameter before the blocks and in the first of them."""
    model = gpt_of_mesh(tie_embeddings=False)
    model.blocks[0] = ReadsEmbedding(model.blocks[0], model.embedding)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_what_slices_and_the_step_read_leaves_when_both_are_done(zero_stage):
    """The last slice's backward comes before that of what the step computed in front of the blocks."""
    run = replace(gpt_case(), make=read_twice)
    mesh = Mesh(2, 2, 1, {**SLICES, "zero_stage": zero_stage})
    [records] = on_meshes([(run, mesh)])
    assert_one_process(records, one_process(run), mesh)


@pytest.mark.slow
def test_heads_of_attention_modules_are_shared():
    run = replace(gpt_case(), make=lambda: Encoders(vocabulary=19), at_end=last_schedule)
    mesh = Mesh(1, 2, 2, SLICES)
    [records] = on_meshes([(run, mesh)])
    assert_one_process(records, one_process(run), mesh)
    assert_sliced(records)
