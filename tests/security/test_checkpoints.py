"""Checkpoints of strangers: nothing in them is run, and the refusal says what, where, and what to do."""

import inspect
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata

from lightning_parallel import (
    HybridStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
    cli,
    load_weights,
)
from lightning_parallel.checkpoint import files
from lightning_parallel.checkpoint.allowed import read_metadata
from lightning_parallel.checkpoint.sharded import load_sharded
from tests.harness import free_port, run_ranks
from tests.nets import models, saved
from tests.security.forged import BUILT_OF, FOLDERS, Charge, charge_file, charged_metadata
from tests.trainer.pipelines import join_as_torchrun, make_trainer

READS_OBJECTS = "weights_only" not in inspect.signature(Trainer.fit).parameters  # Lightning before 2.6
needs_weights_only = pytest.mark.skipif(READS_OBJECTS, reason="Lightning reads whole checkpoints before version 2.6")
WORDS = "weights_only=False"


@pytest.fixture
def charge(tmp_path: Path) -> Charge:
    return Charge(tmp_path / "somebody was here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved.unpack("zero_2_sharded", tmp_path)


def refused(what: Callable[[], Any], file: str, name: str = BUILT_OF) -> None:
    """It is refused by the name of the type, the file, and what to do."""
    with pytest.raises(pickle.UnpicklingError) as caught:
        what()
    words = str(caught.value)
    assert name in words and file in words and WORDS in words, words


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", FOLDERS)
def test_a_charge_in_a_folder_is_refused_by_name_and_trusted_on_request(tmp_path, folder, charge, where, capsys):
    FOLDERS[where](folder, charge)
    file = "momentum_buffer" if where == "value" else where
    refused(lambda: load_sharded(folder), file)
    refused(lambda: load_sharded(folder, weights_only=True), file)
    refused(lambda: load_sharded(folder, in_parts=True), file)
    assert cli.main(["consolidate", str(folder), str(tmp_path / "one.ckpt")]) == 1
    words = capsys.readouterr().err
    assert BUILT_OF in words and "--trusted" in words
    assert not charge.went_off and not (tmp_path / "one.ckpt").exists()
    assert cli.main(["consolidate", str(folder), str(tmp_path / "one.ckpt"), "--trusted"]) == 0
    assert charge.went_off


def test_every_folder_of_older_code_is_read_without_trust(tmp_path):
    folders = 0
    for archive in sorted(saved.FOLDER.glob("*.tar.xz")):
        path = saved.unpack(archive.name.removesuffix(".tar.xz"), tmp_path)
        if path.is_dir():
            whole, trusted = (load_sharded(path, weights_only=which) for which in (None, False))
            assert saved.differences(saved.flat(whole), saved.flat(trusted), {"rtol": 0.0, "atol": 0.0}) == []
            folders += 1
        else:
            assert files.read_checkpoint(path)["state_dict"], path
    assert folders >= 14


@pytest.mark.parametrize("name", ["/etc/hostname", "../other.distcp", "..", "deeper/0.distcp"])
def test_a_folder_names_no_file_outside_of_itself(folder, name):
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read .* outside of its folder"):
        load_sharded(folder)


def test_a_folder_changes_no_class(folder):
    """A pickle may set attributes of a class that it asks for, which whoever reads next would have."""
    target = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (folder / ".metadata").write_bytes(b"\x80\x02" + target + b"N}X\x07\x00\x00\x00versionK\x01s\x86b.")
    with pytest.raises(ValueError, match=r"sets attributes of <class .*Metadata"):
        load_sharded(folder)
    assert dcp_metadata.Metadata.version is None


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"no pickle", pickle.dumps([1]), pickle.dumps({})])
def test_a_damaged_folder_is_named(folder, content):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        load_sharded(folder)


def test_a_folder_whose_tensors_are_cut_off_is_named(folder):
    for part in folder.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read as a sharded checkpoint"):
        load_sharded(folder)


def test_every_name_that_torch_writes_is_read_and_no_other(tmp_path):
    properties = [
        dcp_metadata.TensorProperties(dtype=dtype, layout=layout)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
        for layout in (torch.strided, torch.sparse_coo)
    ]
    tensors = {str(i): dcp_metadata.TensorStorageMetadata(one, torch.Size([2]), []) for i, one in enumerate(properties)}
    whole = dcp_metadata.Metadata(
        {**tensors, "rest": dcp_metadata.BytesStorageMetadata()},
        planner_data=OrderedDict(a=("a", 1)),
        storage_data={},
        storage_meta=dcp_metadata.StorageMeta(tmp_path),
    )
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(whole, protocol))
        found = read_metadata(tmp_path / ".metadata")
        assert found.storage_meta is not None and found.storage_meta.checkpoint_id == str(tmp_path)
        assert found.state_dict_metadata == whole.state_dict_metadata and found.planner_data == whole.planner_data
        for odd in (nn.Linear, getattr, torch.load, eval):
            (tmp_path / ".metadata").write_bytes(pickle.dumps([odd], protocol))
            refused(lambda: read_metadata(tmp_path / ".metadata"), ".metadata", odd.__name__)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("as_zip", [True, False])
def test_a_charge_in_a_file_is_refused_by_name(tmp_path, charge, protocol, as_zip):
    path = tmp_path / "a.ckpt"
    torch.save(
        {"state_dict": {"w": torch.ones(2)}, "x": charge},
        path,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=as_zip,
    )
    reads: list[Callable[[], Any]] = [
        lambda: files.read_checkpoint(path),
        lambda: files.read(path, "meta", True),
        lambda: load_weights(nn.Linear(1, 1), path),
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol 4 in the checkpoint")
        for read in reads:
            refused(read, "a.ckpt")
    assert not charge.went_off
    assert files.read_checkpoint(path, weights_only=False)["x"] is None and charge.went_off


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bare_pickle_is_refused_by_name(tmp_path, charge):
    for protocol in (2, *range(4, pickle.HIGHEST_PROTOCOL + 1)):
        (tmp_path / "a.ckpt").write_bytes(pickle.dumps(charge, protocol))
        refused(lambda: files.read_checkpoint(tmp_path / "a.ckpt"), "a.ckpt")
    assert not charge.went_off


# -- the ways in of each strategy --------------------------------------------------------------------------------------

STRATEGIES: dict[str, Callable[[], Any]] = {
    "pipeline": lambda: PipelineStrategy(num_microbatches=1),
    "zero_1": lambda: ZeROStrategy(stage=1),
    "zero_2": lambda: ZeROStrategy(stage=2),
    "zero_3": lambda: ZeROStrategy(stage=3),
    "hybrid": lambda: HybridStrategy(),
    "tensor": TensorParallelStrategy,
    "servers": lambda: ParameterServerStrategy(start_method="popen"),
}


def ways_in(make: Callable[[], Any], path: Path, **more: Any) -> list[Callable[[], Any]]:
    """Everything that takes `ckpt_path`."""

    def run(verb: str) -> Any:
        trainer = make_trainer(make(), 1, max_epochs=3, limit_val_batches=0 if verb == "fit" else 1)
        loader = models.batches(1)
        data = (loader, loader) if verb == "fit" else (loader,)
        return getattr(trainer, verb)(Verbs(models.layers(norms=False)), *data, ckpt_path=path, **more)

    return [partial(run, verb) for verb in ("fit", "validate", "test", "predict")]


class Verbs(models.Rows):
    """The module of the older files, with all of Lightning's steps."""

    def validation_step(self, batch: Any, index: int) -> None: ...

    def test_step(self, batch: Any, index: int) -> None: ...

    def predict_step(self, batch: Any, index: int) -> Any:
        return self(batch["x"])


@needs_weights_only
@pytest.mark.parametrize("name", STRATEGIES)
def test_ckpt_path_of_a_stranger_runs_nothing(tmp_path, charge, name):
    path = saved.unpack("zero_2_full", tmp_path)
    charge_file(path, charge)
    for way in ways_in(STRATEGIES[name], path):
        refused(way, path.name)
        assert not charge.went_off


@needs_weights_only
@pytest.mark.parametrize("where", FOLDERS)
@pytest.mark.parametrize(
    "name", ["pipeline", "zero_2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("zero_3", "hybrid", "tensor"))]
)
def test_a_folder_of_a_stranger_runs_nothing_unless_it_is_trusted(tmp_path, folder, charge, name, where):
    FOLDERS[where](folder, charge)
    fit, *others = ways_in(STRATEGIES[name], folder)
    refused(fit, "momentum_buffer" if where == "value" else where)
    for way in others:
        if where == "value":  # of an optimizer's state, which a pipeline does not read where it has no optimizer
            with suppress(pickle.UnpicklingError):
                way()
        else:
            refused(way, where)
    assert not charge.went_off
    if where != "value":
        _, validate, *_ = ways_in(STRATEGIES[name], folder, weights_only=False)
        validate()
        assert charge.went_off


@needs_weights_only
@pytest.mark.parametrize("name", ["pipeline", "zero_2"])
def test_a_refusal_ends_all_ranks_with_the_same_words(tmp_path, folder, charge, name):
    charged_metadata(folder, charge)
    make = {"pipeline": lambda: PipelineStrategy(num_microbatches=2)}.get(name, STRATEGIES[name])

    def on_rank(rank: int, port: int) -> str:
        join_as_torchrun(rank, 2, port)
        trainer = make_trainer(make(), 2, max_epochs=3, limit_val_batches=0, use_distributed_sampler=False)
        with pytest.raises(pickle.UnpicklingError) as caught:
            trainer.fit(models.rows(), models.batches(2), models.batches(1), ckpt_path=folder)
        return str(caught.value)

    first, second = run_ranks(on_rank, 2, free_port(), group=False)
    assert first == second and BUILT_OF in first and WORDS in first
    assert not charge.went_off


class Note:
    """A type of the user's."""


class NotedSGD(torch.optim.SGD):
    """Keeps an object of the user's beside each parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("note", Note())
        return loss


class Noted(Verbs):
    def configure_optimizers(self) -> Any:
        return NotedSGD(self.parameters(), lr=0.1, momentum=0.9)


@needs_weights_only
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_an_optimizers_own_types_need_trust_or_a_place_on_the_list(tmp_path, kind):
    def run(**resume: Any) -> Any:
        trainer = make_trainer(
            PipelineStrategy(num_microbatches=1, state_dict_type=kind), 1, max_epochs=3 if resume else 1
        )
        trainer.fit(Noted(models.layers(norms=False)), models.batches(1), models.batches(1), **resume)
        return trainer

    path = tmp_path / "noted.ckpt"
    run().save_checkpoint(path)
    file = "note" if kind == "sharded" else path.name
    refused(lambda: run(ckpt_path=path), file, f"{__name__}.Note")
    trusted = run(ckpt_path=path, weights_only=False)
    with torch.serialization.safe_globals([Note]):
        listed = run(ckpt_path=path)
    for trainer in (trusted, listed):
        assert trainer.global_step == 3
        assert all(isinstance(state["note"], Note) for state in trainer.optimizers[0].state.values())
