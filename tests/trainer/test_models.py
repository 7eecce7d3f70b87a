"""Architectures as their authors wrote them, cut by blocks="auto": each trains as in one process, or is refused."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import BoringModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.trainer.architectures import (
    BART,
    BERT,
    DECODER,
    LABELS,
    RESNET,
    T5,
    VIT,
    VOCABULARY,
    Supervised,
    Translation,
    images,
    padded_texts,
    placed_texts,
    sounds,
    texts,
    tiny,
)
from tests.trainer.modules import CLASSES, Classifier
from tests.trainer.pipelines import Case, Record, assert_same, failure_of, many_on_stages, one_process

pytestmark = pytest.mark.slow

TWO = {"max_steps": 2}
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
SILENT = {"suppress_tokens": None, "begin_suppress_tokens": None}
CLASSIFIER = ("BertForSequenceClassification", "BertConfig", BERT)
DISTILBERT = {
    "vocab_size": VOCABULARY, "dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 32, "dropout": 0.0,
    "num_labels": LABELS, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "max_position_embeddings": 16,
}  # fmt: skip
DEBERTA = {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
GEMMA = {**DECODER, "head_dim": 8, "sliding_window": 4}
ENCODER_BLOCKS = [f"model.{part}.block.{i}" for part in ("encoder", "decoder") for i in range(4)]
OF_ENCODER = {"model.encoder.final_layer_norm": 0, "model.decoder.embed_tokens": 0}


class FrozenNorms(Supervised):
    """A ResNet whose BatchNorms keep the statistics that they have, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__(transformers.ResNetForImageClassification(transformers.ResNetConfig(**RESNET)))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()


class Vgg(Classifier):
    """Convolutions in one Sequential, the classifier in another."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        layers: list[nn.Module] = []
        for before, after in ((3, 4), (4, 4), (4, 8), (8, 8)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.features, self.pool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


def pictures() -> DataLoader:
    return DataLoader([(batch["pixel_values"], batch["labels"]) for batch in images()], batch_size=None)


CASES = {
    "text": {
        "BERT, masked LM": Case(tiny("BertForMaskedLM", "BertConfig", BERT), texts),
        "BERT, classes": Case(tiny(*CLASSIFIER), padded_texts),
        "BERT, gradient checkpointing": Case(tiny(*CLASSIFIER, checkpointing=True), padded_texts),
        "BERT, recompute a block": Case(tiny(*CLASSIFIER), padded_texts, {"recompute": "block"}),
        "BERT, recompute a stage": Case(tiny(*CLASSIFIER), padded_texts, {"recompute": "stage"}),
        "DistilBERT": Case(
            tiny("DistilBertForSequenceClassification", "DistilBertConfig", DISTILBERT), padded_texts
        ),
        "Llama, padded": Case(tiny("LlamaForCausalLM", "LlamaConfig", DECODER), placed_texts),
    },
    "more text": {
        "Gemma 2": Case(tiny("Gemma2ForCausalLM", "Gemma2Config", GEMMA), texts),
        "Qwen 2": Case(tiny("Qwen2ForCausalLM", "Qwen2Config", {**DECODER, "use_cache": True}), texts),
        "DeBERTa": Case(
            tiny("DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA), texts,
            {"stages": {"model.deberta.encoder.rel_embeddings": 0}},
        ),
        "Mixtral": Case(tiny("MixtralForCausalLM", "MixtralConfig", DECODER), texts),
    },
    "two stacks": {
        "T5": Case(tiny("T5ForConditionalGeneration", "T5Config", T5), texts),
        "Whisper": Case(tiny("WhisperForConditionalGeneration", "WhisperConfig", WHISPER | SILENT), sounds),
        "BART": Case(
            tiny("BartForConditionalGeneration", "BartConfig", BART), texts,
            {"stages": {"model.model.decoder.layernorm_embedding": 0}},
        ),
        "Transformer of Lightning's demos": Case(Translation, texts),
    },
    "pictures": {
        "ViT": Case(tiny("ViTForImageClassification", "ViTConfig", VIT), images),
        "ResNet, frozen norms": Case(FrozenNorms, images),
        "VGG": Case(Vgg, pictures),
    },
}  # fmt: skip


@cache
def reference(group: str, name: str) -> Record:
    return one_process(CASES[group][name].but(trainer=TWO))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # transformers 5
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("group", CASES)
def test_architectures(group: str, num_stages: int):
    cases = [case.but(trainer=TWO) for case in CASES[group].values()]
    for name, records in zip(CASES[group], many_on_stages(cases, num_stages), strict=True):
        try:
            assert_same(records, reference(group, name))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_an_encoder_is_cut_too_when_the_blocks_say_so():
    options = {"blocks": ENCODER_BLOCKS, "stages": OF_ENCODER, "partition": [5, 3]}
    case = Case(tiny("T5ForConditionalGeneration", "T5Config", T5), texts, options, TWO)
    [records] = many_on_stages([case], 2)
    assert_same(records, one_process(case))


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_residual_network_with_batch_norm_trains_as_its_micro_batches_do(num_stages: int):
    """One process that takes the micro-batches one by one and adds up their gradients normalises as the pipeline."""
    exact = {"rtol": 1e-9, "atol": 1e-11}
    options = {"precision": "64-true", "max_steps": 2}
    case = Case(tiny("ResNetForImageClassification", "ResNetConfig", RESNET), eights, trainer=options, validate=False)
    apart = case.but(loader=quarters, trainer={"accumulate_grad_batches": 4})
    theirs, [records] = one_process(apart), many_on_stages([case], num_stages)
    losses = torch.stack(theirs.losses).unflatten(0, (2, 4)).sum(1)  # Lightning divides each by four
    torch.testing.assert_close(torch.stack(records[0].losses), losses, **exact)
    for name, value in theirs.weights.items():
        if "running" not in name and "num_batches" not in name:  # they move once a batch, by all of it
            torch.testing.assert_close(records[0].weights[name], value, **exact, msg=name)


def eights() -> DataLoader:
    g = torch.Generator().manual_seed(0)
    make = lambda: {"pixel_values": torch.randn(8, 3, 32, 32, generator=g), "labels": torch.arange(8) % 3}  # noqa: E731
    return DataLoader([make(), make()], batch_size=None)


def quarters() -> DataLoader:
    batches = [{key: value[i : i + 2] for key, value in batch.items()} for batch in eights() for i in range(0, 8, 2)]
    return DataLoader(batches, batch_size=None)


# -- refused in words --------------------------------------------------------------------------------------------------


class Down(nn.Module):
    """Half as large, of other channels."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.conv(x)), 2)


class UNet(Classifier):
    """Skip connections from the way down to the way up."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.down1, self.down2, self.middle = Down(3, 4), Down(4, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(first)
        x = self.up2(torch.cat([self.middle(second), second], 1))
        return self.up1(torch.cat([F.interpolate(x, scale_factor=2), first], 1)).mean((2, 3))


def auxiliary(options: dict[str, Any]) -> Any:
    return tiny("MixtralForCausalLM", "MixtralConfig", {**options, "output_router_logits": True})


REFUSED = {
    "one layer": (
        Case(BoringModel, texts), 2,
        "needs at least 2 blocks, but BoringModel has 1 (layer). Use a pipeline of 1 rank",
    ),
    "shared layers": (
        Case(tiny("AlbertForMaskedLM", "AlbertConfig", {**BERT, "embedding_size": 8}), texts), 4,
        "needs at least 4 blocks, but Supervised has 2 (model.albert, model.predictions). Use a pipeline of 2 ranks",
    ),
    "skips to the last stage": (
        Case(UNet, pictures), 2, "passes to `up1` (stage 1) a value computed from the output of `down1` (stage 0)"
    ),
    "skips over stages": (
        Case(UNet, pictures), 4,
        "`up1` of stage 3 needs a value computed from the output of `down1` (stage 0), which stage 2 does not hold.",
    ),
    "registered late": (
        Case(tiny("BartForConditionalGeneration", "BartConfig", BART), texts), 2,
        'or move it with stages={"model.model.decoder.layernorm_embedding": 0}.',
    ),
    "a loss on routers inside blocks": (
        Case(auxiliary(DECODER), texts), 2,
        "The step reads the output of `model.model.layers.0.mlp.gate` (stage 0), whose data this stage does not hold",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    case, num_stages, text = REFUSED[name]
    assert text in failure_of(case.but(validate=False), num_stages)
