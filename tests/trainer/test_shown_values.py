"""What a progress bar shows is read when it is shown: a device is not waited for after every batch."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_parallel.strategies import ParameterServerStrategy, PipelineStrategy, ZeROStrategy

STRATEGIES = {
    "pipeline": lambda: PipelineStrategy(num_microbatches=1, schedule="gpipe"),
    "servers": ParameterServerStrategy,
    "zero": lambda: ZeROStrategy(stage=1, master_weights=False),
}


class Logs(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log("both", 2 * loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch).mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reads(TorchDispatchMode):
    """Counts what turns a tensor into a number, which on a device waits for it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Batches(Callback):
    """Counts reads between the ends of two batches, and looks at what a bar would show after some of them."""

    def __init__(self, look=()):
        self.reads, self.seen, self.look, self.real, self.last = [], {}, look, {}, {}

    def state_dict(self):
        return {"reads": self.reads, "seen": self.seen, "real": self.real, "last": self.last}

    def load_state_dict(self, state):
        vars(self).update(state)

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == 1:
            self.mode = Reads()
            self.mode.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.real[index] = outputs["loss"].clone()
        if index in self.look:
            self.seen[index] = dict(trainer.progress_bar_metrics)
        if index == 3:
            self.mode.__exit__(None, None, None)
            self.reads.append(self.mode.count)

    def on_train_end(self, trainer, module):
        self.last = dict(trainer.progress_bar_metrics)


def fit(strategy, callback, tmp_path):
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback], default_root_dir=tmp_path,
    )  # fmt: skip
    rows = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
    trainer.fit(Logs(), DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=10))
    return trainer


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_is_read_after_a_batch_that_nobody_shows(name, tmp_path):
    callback = Batches()
    fit(STRATEGIES[name](), callback, tmp_path)
    assert callback.reads == [0]


def test_lightning_itself_reads_after_every_batch(tmp_path):
    callback = Batches()
    fit("auto", callback, tmp_path)
    assert callback.reads[0] >= 3  # else there is nothing left to mend


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_shown_is_the_batch_s_own_number(name, tmp_path):
    callback, plain = Batches(look=(1, 3, 4)), Batches(look=(1, 3, 4))
    trainer, reference = fit(STRATEGIES[name](), callback, tmp_path), fit("auto", plain, tmp_path)
    for index, shown in callback.seen.items():
        assert all(type(value) is float for value in shown.values())
        assert shown == pytest.approx(plain.seen[index]) and shown["loss"] == pytest.approx(float(plain.real[index]))
    pairs = [(callback.last, plain.last)]
    if name != "servers":  # whose workers have ended with the run
        pairs.append((trainer.progress_bar_metrics, reference.progress_bar_metrics))
    for after, wanted in pairs:
        assert all(type(value) is float for value in after.values())
        assert after == pytest.approx(wanted) and {"loss", "both_step", "both_epoch", "val"} <= after.keys()


def test_the_trainer_is_given_back_as_it_was(tmp_path):
    trainer = fit(STRATEGIES["zero"](), Batches(), tmp_path)
    assert type(trainer._logger_connector).__name__ == "_LoggerConnector"
