"""Checkpoints: sharded over ranks, whole under kill -9, refused by name when they are not what they should be."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch import Tensor, nn

import lightning_parallel
from lightning_parallel import cli
from lightning_parallel.checkpoint import files
from lightning_parallel.checkpoint.sharded import load_sharded, save_sharded
from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import Classifier, chain, row_loader, token_loader
from tests.trainer.pipelines import (
    Case,
    assert_same,
    failure_of,
    join_as_torchrun,
    make_trainer,
    on_stages,
    one_process,
)
from tests.trainer.test_parity import KEY_BIAS, gpt, resident_mib

SHARDED = {"state_dict_type": "sharded"}


def saving(path: Path | str, **strategy: Any) -> Case:
    """A run of one epoch that saves at its end."""

    def save(trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(path)

    return Case(gpt, token_loader, strategy, {"max_epochs": 1}, at_end=save)


# -- sharded -----------------------------------------------------------------------------------------------------------


def test_a_folder_goes_from_two_stages_to_four_and_one_and_consolidated_to_one_process(tmp_path):
    folder, file = tmp_path / "sharded.ckpt", tmp_path / "whole.ckpt"
    on_stages(saving(folder, **SHARDED), 2)
    assert (folder / "meta.pt").exists() and len(list(folder.glob("*.distcp"))) == 2
    assert cli.main(["consolidate", str(folder), str(file), "--trusted"]) == 0

    longer = Case(gpt, token_loader, trainer={"max_epochs": 2})
    whole = one_process(longer)
    runs = [
        one_process(longer.but(checkpoint=file)),
        on_stages(longer.but(checkpoint=folder), 4)[0],  # the strategy saves whole files, and reads folders
        on_stages(longer.but(SHARDED, checkpoint=folder), 1)[0],
        on_stages(longer.but(SHARDED, checkpoint=file), 2)[0],
    ]
    for last in runs:
        rest = [*whole.losses[:3], *last.losses]
        torch.testing.assert_close(torch.stack(rest), torch.stack(whole.losses), rtol=2e-5, atol=2e-6)
        if last.weights.keys() == whole.weights.keys():  # a sharded run's records hold a part
            last.losses, last.metrics, last.lrs = whole.losses, whole.metrics, whole.lrs
            assert_same([last], whole, leave_out=KEY_BIAS)


def test_a_consolidated_folder_is_one_processs_file(tmp_path):
    folder, file, plain = tmp_path / "sharded.ckpt", tmp_path / "whole.ckpt", tmp_path / "plain.ckpt"
    on_stages(saving(folder, **SHARDED), 2)
    cli.main(["consolidate", str(folder), str(file), "--trusted"])
    one_process(saving(plain))
    ours, theirs = torch.load(file, weights_only=False), torch.load(plain, weights_only=False)
    assert ours.keys() == theirs.keys()
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for mine, other in zip(ours["optimizer_states"], theirs["optimizer_states"], strict=True):
        assert mine["param_groups"] == other["param_groups"]
        assert {i: list(fields) for i, fields in mine["state"].items()} == {
            i: list(fields) for i, fields in other["state"].items()
        }


def test_each_rank_reads_its_own_part_of_a_folder(tmp_path):
    part = {"state_dict": {"a": torch.ones(2), "b": torch.zeros(3)}, "optimizer_states": [{"state": {}}], "epoch": 4}
    save_sharded(part, ["b", "a"], tmp_path / "folder", lambda: None)
    read = load_sharded(tmp_path / "folder", lambda name: name == "state_dict/a")
    assert list(read["state_dict"]) == ["b", "a"] and read["epoch"] == 4
    assert read["state_dict"]["b"].is_meta and torch.equal(read["state_dict"]["a"], torch.ones(2))


def test_model_checkpoint_keeps_the_best_folders(tmp_path):
    def case(folder: Path) -> Case:
        saver = lambda: [ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_last=True)]  # noqa: E731
        trainer = {"max_epochs": 3, "enable_checkpointing": True, "callbacks": saver}
        return Case(lambda: Classifier(chain(8)), row_loader, trainer=trainer)

    one_process(case(tmp_path / "plain"))
    on_stages(case(tmp_path / "ours").but(SHARDED), 2)
    plain, ours = ({path.name for path in (tmp_path / name).iterdir()} for name in ("plain", "ours"))
    assert ours == plain and len(ours) == 2
    last = load_sharded(tmp_path / "ours" / "last.ckpt", weights_only=False)
    assert last["epoch"] == torch.load(tmp_path / "plain" / "last.ckpt", weights_only=False)["epoch"]


# -- whole or not at all -----------------------------------------------------------------------------------------------


def save_for_ever(path: Path, sharded: bool, started: Any) -> None:
    number = 0
    while True:
        value = {"state_dict": {"x": torch.full((1 << 18,), float(number))}, "number": number}
        if sharded:
            save_sharded(value, ["x"], path, lambda: None)
        else:
            files.write(value, path)
        started.set()
        number += 1


@pytest.mark.parametrize("sharded", [False, True])
def test_a_killed_writer_leaves_a_whole_checkpoint(tmp_path, sharded):
    path, context = tmp_path / "model.ckpt", multiprocessing.get_context("fork")
    for attempt in range(12):
        started = context.Event()
        writer = context.Process(target=save_for_ever, args=(path, sharded, started), daemon=True)
        writer.start()
        assert started.wait(20)
        deadline = time.monotonic() + 0.0017 * attempt  # another moment each time
        while time.monotonic() < deadline:
            pass
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        read = load_sharded(path) if sharded else files.read_checkpoint(path)
        assert torch.equal(read["state_dict"]["x"], torch.full((1 << 18,), float(read["number"])))
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left <= {"model.ckpt", ".model.ckpt.part", ".model.ckpt.old"}


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.ckpt"
    files.write({"state_dict": {}}, path)
    with pytest.raises(AttributeError):
        files.write({"state_dict": {}, "local": lambda: None}, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.ckpt"]
    assert files.read_checkpoint(path) == {"state_dict": {}}


# -- refused by name ---------------------------------------------------------------------------------------------------


def damage(path: Path, kind: str) -> str:
    """Make a file or folder that is no checkpoint; returns what the error says of it."""
    if kind == "cut":
        files.write({"state_dict": {"x": torch.ones(1000)}}, path)
        path.write_bytes(path.read_bytes()[:2000])
        return "It is damaged, or no file that torch.save wrote"
    if kind == "text":
        path.write_text("weights\n" * 100)
        return "It is damaged, or no file that torch.save wrote"
    if kind == "foreign":
        files.write({"net.0.weight": torch.ones(2)}, path)
        return "is no Lightning checkpoint: it holds a mapping with ['net.0.weight'], not 'state_dict'"
    if kind == "folder":
        path.mkdir()
        return "holds no whole sharded checkpoint: meta.pt and .metadata missing"
    return "Checkpoint file not found"


@pytest.mark.parametrize("kind", ["cut", "text", "foreign", "folder"])
def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, kind):
    path = tmp_path / "model.ckpt"
    expected = damage(path, kind)
    message = failure_of(Case(Classifier, row_loader, checkpoint=path))
    assert str(path) in message and expected in message


def test_a_remote_folder_is_refused():
    message = failure_of(saving("memory://folder/model.ckpt", **SHARDED))
    assert message.startswith("memory://folder/model.ckpt is remote, but state_dict_type=")


def test_a_remote_file_is_lightnings():
    path = "memory://folder/model.ckpt"

    def save_and_load(trainer: Trainer, module: LightningModule) -> list[str]:
        trainer.save_checkpoint(path)
        return list(trainer.strategy.load_checkpoint(path, weights_only=False)["state_dict"])

    [record] = on_stages(Case(Classifier, row_loader, at_end=save_and_load), 1)
    assert record.extra == list(record.weights)


def test_an_optimizer_of_other_groups_is_refused(tmp_path):
    path = tmp_path / "model.ckpt"
    one_process(Case(Classifier, row_loader, at_end=lambda trainer, module: trainer.save_checkpoint(path)))
    message = failure_of(Case(TwoGroups, row_loader, checkpoint=path))
    assert "The checkpoint's SGD has parameter groups of sizes [16], this run's has [2, 14]" in message


class TwoGroups(Classifier):
    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1, momentum=0.9)


# -- weights from elsewhere --------------------------------------------------------------------------------------------


class Pretrained(Classifier):
    """Builds its network without memory and takes weights from a file."""

    def __init__(self, path: Path, width: int = 6) -> None:
        LightningModule.__init__(self)
        self.path, self.width = path, width

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = chain(4, width=self.width)
            lightning_parallel.load_weights(self, self.path, prefix="net.")


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "json"])
def test_pretrained_weights_are_the_files_on_every_layout(tmp_path, suffix):
    torch.manual_seed(9)
    state = chain(4).state_dict()
    path = tmp_path / f"model.{suffix}"
    if suffix == "safetensors":
        save_file(state, path)
    elif suffix == "pt":
        torch.save(state, path)
    else:
        names = list(state)
        parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
        for file, keys in parts.items():
            save_file({key: state[key] for key in keys}, tmp_path / file)
        weight_map = {key: file for file, keys in parts.items() for key in keys}
        path.write_text(json.dumps({"weight_map": weight_map}))
    case = Case(lambda: Pretrained(path), row_loader)
    for records in ([one_process(case)], on_stages(case, 2)):
        for name, value in state.items():
            assert torch.equal(records[0].initial[f"net.{name}"], value)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(chain(5).state_dict(), path)
    message = failure_of(Case(lambda: Pretrained(path), row_loader))
    assert "does not fit Pretrained with prefix='net.'" in message and "unexpected ['8.bias', '8.weight']" in message
    save_file(chain(4, width=5).state_dict(), path)
    message = failure_of(Case(lambda: Pretrained(path), row_loader))
    assert "of shape (5, 5), but `net." in message and "of Pretrained has (6, 6)" in message
    path.write_bytes(b"no safetensors")
    assert "cannot be read as safetensors" in failure_of(Case(lambda: Pretrained(path), row_loader))


class Wide(Pretrained):
    """Notes how much memory the process took while its model was set up."""

    def setup(self, stage: str) -> None:
        self.before = resident_mib()

    def on_fit_start(self) -> None:
        self.taken = resident_mib() - self.before

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_a_rank_reads_no_more_than_its_own_weights(tmp_path):
    width = 2048  # 16 MiB a layer, three of them and a small one
    path = tmp_path / "model.safetensors"
    save_file(chain(4, width=width).state_dict(), path)

    def taken(rank: int, port: int) -> float:
        join_as_torchrun(rank, 2, port)
        module = Wide(path, width)
        strategy = PipelineStrategy(num_microbatches=1, partition=[4, 3])
        trainer = make_trainer(strategy, 2, max_steps=1, limit_val_batches=0)
        trainer.fit(module, row_loader((2,), width=width), row_loader((2,), width=width))
        return module.taken

    last, first = run_ranks(taken, 2, free_port(), group=False)
    assert 32 <= first < 32 + 20 and 16 <= last < 16 + 20  # connections, threads and one layer on its way
