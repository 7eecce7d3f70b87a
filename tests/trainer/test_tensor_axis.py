"""Meshes with a tensor axis train as one process does, whatever the schedule, and save what one process saves."""

from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule, callbacks

from lightning_parallel.callbacks import CommunicationMonitor
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.demo.huggingface import HuggingFaceLM
from lightning_parallel.strategies import TensorParallelStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.conformance.cut import told
from tests.trainer.hybrids import (
    ADAM,
    CLOSE,
    ROWS,
    TOKENS,
    Mesh,
    assert_one_process,
    gpt,
    gpt_case,
    on_meshes,
    token_loader,
)
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import BF16, Case, Record, fit, join_as_torchrun, make_trainer, one_process


def llama(**options: Any) -> HuggingFaceLM:
    return HuggingFaceLM("llama", vocabulary=19, context=16, width=16, num_blocks=4, num_heads=4, **options)


def one_key_head() -> HuggingFaceLM:
    module = llama()
    module.model.config.num_key_value_heads = 1
    module.model = type(module.model)(module.model.config)
    return module


def gpt_oss() -> HuggingFaceLM:
    """Experts with biases, and a router; sinks in its attention."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 4,
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "sliding_window": 4}
    config = transformers.GptOssConfig(vocab_size=19, max_position_embeddings=16, use_cache=False, **sizes, **experts)
    module = llama()
    module.model = transformers.GptOssForCausalLM(config)
    return module


def whole_gpt() -> Any:
    return gpt(num_heads=4)


MESHES = {
    "1 x 2 x 2, zb_v": Mesh(1, 2, 2, {"schedule": "zb_v"}),
    "1 x 2 x 2, recomputed, slices": Mesh(1, 2, 2, {"recompute": "block", "sequence_parallel": True}),
    "1 x 2 x 2, zb_v, slices": Mesh(1, 2, 2, {"schedule": "zb_v", "sequence_parallel": True}),
    "1 x 2 x 2, recomputed, parts": Mesh(1, 2, 2, {"recompute": "block", "partition_activations": True}),
    "2 x 1 x 2": Mesh(2, 1, 2),
    "2 x 1 x 2, split, slices": Mesh(2, 1, 2, {"schedule": "zb_h1", "sequence_parallel": True}),
    "1 x 1 x 4": Mesh(1, 1, 4, {"loss_parallel": True}),
}
OVERLAPPED = {
    "1 x 2 x 2, recomputed, overlap": Mesh(1, 2, 2, {"recompute": "block", "overlap_sums": True}),
    "2 x 1 x 2, overlap": Mesh(2, 1, 2, {"overlap_sums": True}),
    "2 x 1 x 2, divided, overlap": Mesh(2, 1, 2, {"zero_stage": 3, "gather": "microbatch", "overlap_sums": True}),
}


def assert_replicated_bits(records: Any, mesh: Mesh) -> None:
    """What every rank of a tensor axis holds is the same to the bit (as is what is made whole of parts)."""
    for record in records[1 : mesh.tensor]:
        if mesh.pipeline == 1:
            assert all(torch.equal(value, records[0].own[name]) for name, value in record.own.items())


def test_a_tensor_axis_is_one_process():
    check_layouts(whole_gpt, ["1 x 2 x 2, zb_v, slices", "1 x 1 x 4"])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [whole_gpt, llama, one_key_head, gpt_oss])
def test_layouts_with_a_tensor_axis_are_one_process(make):
    check_layouts(make, list(MESHES), timeout=110.0)


def check_layouts(make: Any, names: list[str], timeout: float = 55.0) -> None:
    case = gpt_case(accumulate_grad_batches=2).but(make=make)
    reference, meshes = one_process(case), [{**MESHES, **OVERLAPPED}[name] for name in names]
    for mesh, records in zip(meshes, on_meshes([(case, mesh) for mesh in meshes], timeout), strict=True):
        assert_one_process(records, reference, mesh)
        assert_replicated_bits(records, mesh)


def parts_were_gathered(trainer: Any, module: Any) -> None:
    """Of each of 4 blocks' inputs [rows, tokens, 16], once a backward of 3 steps; a mask of bools is not cut."""
    assert trainer.strategy.gathered_inputs.nbytes == {"all_gather": 3 * 4 * ROWS * TOKENS * 16 * 4}


def test_of_inputs_that_wait_each_rank_keeps_a_part():
    case = gpt_case().but(make=whole_gpt)
    mesh = Mesh(1, 1, 2, {"recompute": "block", "partition_activations": True})
    [records] = on_meshes([(case.but(at_end=parts_were_gathered), mesh)])
    assert_one_process(records, one_process(case), mesh)


def test_parts_of_inputs_are_of_blocks_that_are_computed_again():
    with pytest.raises(ValueError, match=r'partition_activations=True.*recompute="block"'):
        TensorParallelStrategy(partition_activations=True)


@pytest.mark.slow
def test_sums_of_inputs_gradients_that_overlap_are_one_process():
    check_layouts(whole_gpt, list(OVERLAPPED))
    half = gpt_case(precision="bf16-mixed").but(make=whole_gpt)
    [records] = on_meshes([(half, Mesh(1, 1, 2, {"overlap_sums": True}))])
    torch.testing.assert_close(torch.stack(records[0].losses), torch.stack(one_process(half).losses), **BF16)


def test_sums_overlap_where_weights_gradients_are_made_in_the_same_backward():
    with pytest.raises(ValueError, match=r"overlap_sums=True.*sequence_parallel=False"):
        TensorParallelStrategy(overlap_sums=True, sequence_parallel=True)
    with pytest.raises(Exception, match=r"overlap_sums=True\) makes gradients of weights.*schedule 'zb_v"):
        on_meshes([(gpt_case().but(make=whole_gpt), Mesh(1, 2, 2, {"overlap_sums": True, "schedule": "zb_v"}))])


@pytest.mark.slow
def test_a_checkpoint_goes_to_any_layout_and_one_process_and_back(tmp_path):
    plain, file, folder = tmp_path / "plain.ckpt", tmp_path / "file.ckpt", tmp_path / "folder.ckpt"
    case = gpt_case(max_steps=-1, max_epochs=1).but(make=whole_gpt)
    longer = case.but(trainer={"max_epochs": 2})
    reference = one_process(longer)
    one_process(case.but(at_end=saver(plain)))
    sharded = {"state_dict_type": "sharded"}
    jobs = [
        (case.but(at_end=saver(file)), Mesh(1, 2, 2)),
        (case.but(at_end=saver(folder)), Mesh(1, 2, 2, sharded)),
        (longer.but(checkpoint=file), Mesh(1, 1, 4)),
        (longer.but(checkpoint=folder), Mesh(2, 2, 1)),
        (longer.but(checkpoint=plain), Mesh(1, 2, 2)),
        (longer.but(checkpoint=folder), Mesh(2, 1, 2, sharded)),
    ]
    rest = torch.stack(reference.losses[6:])
    for (_, mesh), records in [*zip(jobs, on_meshes(jobs), strict=True)][2:]:
        by_place = {mesh.place(rank): torch.stack(record.losses) for rank, record in enumerate(records)}
        torch.testing.assert_close(torch.stack([*by_place.values()]).mean(0), rest, **CLOSE)
    again = one_process(longer.but(checkpoint=file))
    torch.testing.assert_close(torch.stack(again.losses), rest, **CLOSE)
    ours, theirs = torch.load(file, weights_only=False), torch.load(plain, weights_only=False)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]


def saver(path: Any) -> Any:
    return lambda trainer, module: trainer.save_checkpoint(path)


class Counts(callbacks.ModelSummary):
    """Keeps what the summary would show."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        shown = self._summary(trainer, pl_module)
        self.shown = [shown.total_parameters, shown.trainable_parameters, shown.model_size, *shown.param_nums]
        self.held = sum(p.numel() for p in pl_module.parameters())


def test_after_fit_every_rank_has_whole_weights_and_may_go_on(tmp_path):
    def after(trainer: Any, module: Any) -> Any:
        trainer.save_checkpoint(tmp_path / "after.ckpt")
        [scores] = trainer.validate(module, token_loader(), verbose=False)
        [counts] = [callback for callback in trainer.callbacks if isinstance(callback, Counts)]
        assert counts.held == sum(p.numel() for p in module.parameters())
        return {name: p.detach().clone() for name, p in module.named_parameters()}, scores, counts.shown

    case = gpt_case(limit_val_batches=2, callbacks=lambda: [Counts()]).but(make=whole_gpt, after=after, validate=True)
    [records] = on_meshes([(case, Mesh(1, 1, 2))])
    reference = one_process(case)
    for record in records:
        torch.testing.assert_close(record.extra[0], reference.extra[0], **ADAM)
        assert record.extra[2] == reference.extra[2]
        torch.testing.assert_close(record.extra[1]["val_loss"], reference.extra[1]["val_loss"], rtol=1e-4, atol=0)
    saved = torch.load(tmp_path / "after.ckpt", weights_only=False)
    torch.testing.assert_close(saved["state_dict"]["blocks.0.qkv.weight"], records[1].extra[0]["blocks.0.qkv.weight"])
    assert saved["optimizer_states"][0]["state"][0]["exp_avg"].shape == (19, 16)


@pytest.mark.slow
@pytest.mark.parametrize("sliced", [False, True])
def test_masks_are_those_of_the_layer_whatever_the_pipeline_and_what_is_recomputed(sliced):
    case = gpt_case().but(make=lambda: gpt(num_heads=4, dropout=0.3))
    options: list[dict[str, Any]] = [{}, {"recompute": "block"}, {"schedule": "zb_v"}, {"recompute": "stage"}]
    jobs = [(case, Mesh(1, 2, 2, {"sequence_parallel": sliced, **more})) for more in options]
    first, *others = on_meshes(jobs)
    for records in [first, *others]:
        torch.testing.assert_close(torch.stack(records[0].losses), torch.stack(first[0].losses), **CLOSE)
        for mine, other in ((0, 1), (2, 3)):  # neighbours along the tensor axis
            pairs = zip(records[mine].own.values(), records[other].own.values(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
def test_the_data_axis_divides_the_states_of_what_the_tensor_axis_cuts(tmp_path):
    case = gpt_case(max_steps=-1, max_epochs=1, accumulate_grad_batches=2).but(make=whole_gpt)
    reference = one_process(case)
    options: list[dict[str, Any]] = [
        {"zero_stage": 1, "sequence_parallel": True},
        {"zero_stage": 2},
        {"zero_stage": 3, "sequence_parallel": True},
        {"zero_stage": 3, "gather": "microbatch", "state_dict_type": "sharded"},
    ]
    jobs = [
        (case.but(at_end=saver(tmp_path / f"{number}.ckpt")), Mesh(2, 1, 2, more))
        for number, more in enumerate(options)
    ]
    for (_, mesh), records in zip(jobs[:3], on_meshes(jobs)[:3], strict=True):
        assert_one_process(records, reference, mesh)
    longer = case.but(trainer={"max_epochs": 2})
    rest = torch.stack(one_process(longer).losses[6:])
    goes_on = [(longer.but(checkpoint=tmp_path / f"{number}.ckpt"), Mesh(1, 2, 2)) for number in (0, 2, 3)]
    for records in on_meshes(goes_on):
        torch.testing.assert_close(torch.stack(records[0].losses), rest, **CLOSE)


@pytest.mark.parametrize("sliced", [False, True])
def test_a_layer_sends_what_megatron_says(sliced):
    """Four all-reduces of rows x positions x width a layer, or as much in gathers and scatters of slices; gradients of
    norms and biases, once a step of four micro-batches."""

    def monitored(rank: int, port: int) -> dict[Any, int]:
        join_as_torchrun(rank, 2, port)
        monitor = CommunicationMonitor(every_n_steps=3)
        strategy = TensorParallelStrategy(sequence_parallel=sliced, num_microbatches=4)
        trainer = make_trainer(strategy, 2, [monitor], limit_val_batches=0)
        trainer.fit(whole_gpt(), token_loader(), token_loader())
        return {(what, phase): m.nbytes for (axis, what, phase), m in monitor.last.items() if axis == "tensor"}

    found = run_ranks(monitored, 2, free_port(), group=False)[0]
    tokens, layers = 8 * 12 * 4, 4  # bytes
    vector = tokens * 16
    around = 2 * vector  # the embedding's sum, and that of the gradient of the head's input
    logits = tokens * 20  # 19, padded to what two ranks divide
    if not sliced:
        assert sum(found.values()) == layers * 4 * vector + around + logits
        return
    ends, small = 2 * vector, layers * 6 * 16 * 4  # where slices begin and end; gradients of norms and row-wise biases
    assert found["all_reduce", "forward"] == around + small
    assert found["reduce_scatter", "forward"] == layers * 4 * vector
    assert found["all_gather", "forward"] == layers * 4 * vector + ends + logits


class LateGPT(LightningModule):
    """Builds its layers in `configure_model`, where they have no memory."""

    training_step, validation_step, configure_optimizers = (
        GPT.training_step, GPT.validation_step, GPT.configure_optimizers,
    )  # fmt: skip
    _loss, forward = GPT._loss, GPT.forward

    def __init__(self) -> None:
        super().__init__()
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is None:
            built = gpt(num_heads=4, tie_embeddings=False)
            self.context, self.explicit_mask, self.learning_rate = built.context, True, 1e-3
            for name, child in built.named_children():
                setattr(self, name, child)


@pytest.mark.slow
def test_initial_values_of_modules_without_memory_are_those_of_any_layout():
    case = gpt_case().but(make=LateGPT)
    meshes = [Mesh(2, 2, 1), Mesh(1, 2, 2), Mesh(1, 1, 4, {"sequence_parallel": True, "loss_parallel": True})]
    stages, cut_stages, cut = (records[0] for records in on_meshes([(case, mesh) for mesh in meshes]))
    assert all(torch.equal(cut_stages.initial[name], value) for name, value in stages.initial.items())
    reference = one_process(case)  # where the model is one stage it is built with memory, as here
    assert all(torch.equal(cut.initial[name], value) for name, value in reference.initial.items())
    torch.testing.assert_close(torch.stack(cut.losses), torch.stack(reference.losses), **CLOSE)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(callbacks, "EMAWeightAveraging"), reason="Lightning averages weights from version 2.6 on"
)
def test_half_precision_and_averages_of_weights_are_one_processs():
    def weights(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    half = gpt_case(precision="bf16-mixed").but(make=whole_gpt)
    averaged = gpt_case(callbacks=lambda: [callbacks.EMAWeightAveraging(decay=0.5)], max_steps=-1, max_epochs=1).but(
        make=whole_gpt, after=weights
    )
    jobs = [(half, Mesh(1, 1, 2, {"sequence_parallel": True})), (averaged, Mesh(1, 1, 2))]
    in_half, with_average = on_meshes(jobs)
    torch.testing.assert_close(torch.stack(in_half[0].losses), torch.stack(one_process(half).losses), **BF16)
    torch.testing.assert_close(with_average[1].extra, one_process(averaged).extra, **ADAM)


class CastsByItself(Classifier):
    """Autocast within its own step, where the first call of a cut module is tried under random weights."""

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(batch)


def test_casts_of_random_weights_are_not_kept():
    """Autocast keeps casts of parameters until its context ends, also those that no gradient goes through."""
    case = Case(CastsByItself, row_loader, validate=False)

    def on_rank(rank: int, port: int) -> Record:
        join_as_torchrun(rank, 2, port)
        return fit(case, told(TensorParallelStrategy()), 2)

    found, reference = run_ranks(on_rank, 2, free_port(), group=False)[0], one_process(case)
    for name, value in reference.weights.items():
        torch.testing.assert_close(found.weights[name], value, **BF16)
