"""The demo's modules are ordinary: each trains on one device under a plain Trainer and gets better."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything

from lightning_parallel.demo import GPT, DigitsClassifier, DigitsDataModule, HuggingFaceLM, TextDataModule


def trained(model: LightningModule, data: LightningDataModule, tmp_path, steps: int, **trainer) -> Trainer:
    runner = Trainer(
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer,
    )
    runner.fit(model, data)
    return runner


@pytest.fixture(autouse=True)
def _seed():
    seed_everything(0)


def test_digits_learns(tmp_path):
    trainer = trained(DigitsClassifier(num_layers=4), DigitsDataModule(), tmp_path, steps=72)
    assert trainer.callback_metrics["val_accuracy"] > 0.8


@pytest.mark.parametrize(
    ("build", "data", "shape"),
    [
        (partial(DigitsClassifier, num_layers=2), DigitsDataModule(), (64,)),
        (partial(GPT, width=8, num_blocks=1, context=16), TextDataModule(context=16), (32,)),
        (partial(HuggingFaceLM, width=8, num_blocks=1, context=16), TextDataModule(context=16), (32,)),
    ],
)
def test_every_model_tests_and_predicts(tmp_path, build, data, shape):
    model = build()
    quiet = {"logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    trainer = Trainer(accelerator="cpu", limit_test_batches=2, limit_predict_batches=2, **quiet)
    assert "test_loss" in trainer.test(model, data, verbose=False)[0]
    assert [rows.shape for rows in trainer.predict(model, data)] == [shape, shape]


def test_digits_parts_are_disjoint_and_the_same_each_time():
    one, other = DigitsDataModule(), DigitsDataModule()
    one.setup("fit")
    other.setup("fit")
    assert len(one.train) == 1536 and len(one.validation) == 256
    assert torch.equal(one.train.tensors[0], other.train.tensors[0])


@pytest.mark.parametrize("options", [{}, {"explicit_mask": False, "tie_embeddings": False, "dropout": 0.1}])
def test_gpt_learns_bytes(tmp_path, options):
    model = GPT(width=32, num_blocks=2, context=64, learning_rate=3e-3, **options)
    trainer = trained(model, TextDataModule(context=64, batch_size=16), tmp_path, steps=30)
    assert trainer.callback_metrics["val_loss"] < 3.6  # log 256 is 5.5, byte frequencies alone give about 3.3


def test_gpt_trains_in_bf16(tmp_path):
    model = GPT(width=32, num_blocks=1, context=32)
    trainer = trained(model, TextDataModule(context=32, batch_size=8), tmp_path, steps=3, precision="bf16-mixed")
    assert trainer.callback_metrics["val_loss"].isfinite()


def test_gpt_ties_its_head_and_the_two_masks_are_one():
    model = GPT(width=32, num_blocks=2, context=16)
    assert model.head.weight is model.embedding.weight
    tokens = torch.randint(256, (2, 16))
    with_mask = model(tokens)
    model.explicit_mask = False
    torch.testing.assert_close(model(tokens), with_mask)


def test_gpt_does_not_look_ahead():
    model = GPT(width=32, num_blocks=2, context=16).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 8:] = 0
    torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8])


def test_gpt_names_what_does_not_fit():
    with pytest.raises(ValueError, match=r"GPT\(width=30, num_heads=4\): the heads must divide the width\."):
        GPT(width=30)
    with pytest.raises(ValueError, match=r"GPT\(context=4\) got rows of 5 tokens\. Shorten them or raise context\."):
        GPT(width=8, num_blocks=1, context=4)(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_hugging_face_models_learn_bytes(tmp_path, architecture):
    model = HuggingFaceLM(architecture, width=32, num_blocks=2, context=64, learning_rate=3e-3)
    trainer = trained(model, TextDataModule(context=64, batch_size=16), tmp_path, steps=30)
    assert trainer.callback_metrics["val_loss"] < 3.8


def test_text_of_your_own(tmp_path):
    (tmp_path / "text").write_text("abcd" * 100)
    data = TextDataModule(context=8, batch_size=4, path=str(tmp_path / "text"))
    data.setup("fit")
    assert next(iter(data.val_dataloader()))["input_ids"].tolist() == [[97, 98, 99, 100] * 2] * 4
    with pytest.raises(ValueError, match="got a text of 400 bytes"):
        TextDataModule(context=100, path=str(tmp_path / "text")).setup("fit")
