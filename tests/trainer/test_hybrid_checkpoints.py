"""What a mesh saves, any other mesh and one process go on from, as if nothing had come between."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from lightning_parallel.checkpoint.sharded import consolidate
from lightning_parallel.strategies import ZeROStrategy
from tests.trainer.hybrids import Mesh, assert_one_process, gpt, gpt_case, on_meshes
from tests.trainer.pipelines import Case, Record, one_process

SMALL = {"bucket_mb": 1e-3}


@dataclass(frozen=True)
class AllAlongData(Mesh):
    """Ranks of the other strategy that divides states."""

    def strategy(self) -> Any:
        return ZeROStrategy(stage=2)


LAYOUTS = {
    "zero 3, zb_v": Mesh(2, 2, 1, {"zero_stage": 3, "gather": "microbatch", "schedule": "zb_v", **SMALL}),
    "zero 2": Mesh(2, 2, 1, {"zero_stage": 2, **SMALL}),
    "zero 1, four copies": Mesh(4, 1, 1, {"zero_stage": 1, **SMALL}),
    "four stages": Mesh(1, 4),
    "zero 3, interleaved": Mesh(2, 2, 1, {"zero_stage": 3, "schedule": "interleaved_1f1b", **SMALL}),
    "zero 3, tensor": Mesh(2, 1, 2, {"zero_stage": 3, **SMALL}),
    "stages, tensor": Mesh(1, 2, 2, {"schedule": "zb_v"}),
    "four slices": Mesh(1, 1, 4),
}
RESUMING = {**LAYOUTS, "ZeROStrategy": AllAlongData(4)}


def epochs(count: int, **other) -> Case:
    case = gpt_case(max_epochs=count, max_steps=-1, limit_train_batches=2)
    return case.but(make=lambda: gpt(num_heads=4), **other)


def kept(mesh: Mesh, kind: str) -> Mesh:
    return Mesh(mesh.data, mesh.pipeline, mesh.tensor, {**mesh.options, "state_dict_type": kind})


def saving(mesh: str, kind: str, path: Path, moment: str = "at_end", read: bool = False) -> tuple[Case, Mesh]:
    def save(trainer, module) -> dict[str, tuple[int, ...]]:
        trainer.save_checkpoint(path)
        return shapes_read(trainer, path) if read else {}

    return epochs(1, **{moment: save}), kept(LAYOUTS[mesh], kind)


def shapes_read(trainer, path: Path) -> dict[str, tuple[int, ...]]:
    """Of what this rank reads in a folder."""
    saved = trainer.strategy.load_checkpoint(path, weights_only=False)
    weights = {name: tuple(value.shape) for name, value in saved["state_dict"].items() if not value.is_meta}
    states = saved["optimizer_states"][0]["state"].items()
    return weights | {f"{number}.{name}": tuple(x.shape) for number, of in states for name, x in of.items()}


def resuming(mesh: str, path: Path) -> tuple[Case, Mesh]:
    return epochs(2, checkpoint=path), RESUMING[mesh]


def assert_goes_on(records: list[Record], whole: Record, mesh: Mesh) -> None:
    """The second epoch is that of a run that was not interrupted."""
    rest = Record(whole.losses[2:], weights=whole.weights, optimizers=whole.optimizers)
    assert_one_process(records, rest, mesh)


SAVED = [("zero 3, zb_v", "sharded", "at_end"), ("zero 3, tensor", "full", "after")]
RESUMED = [("zero 1, four copies", 0), ("four stages", 0), ("zero 3, zb_v", 1), ("zero 3, interleaved", None)]


def test_layouts_go_on_from_each_others_checkpoints(tmp_path):
    paths = [tmp_path / f"{i}.ckpt" for i in range(len(SAVED))]
    jobs = [saving(mesh, kind, path, moment) for (mesh, kind, moment), path in zip(SAVED, paths, strict=True)]
    one = tmp_path / "one.ckpt"
    one_process(epochs(1, at_end=lambda trainer, module: trainer.save_checkpoint(one)))
    jobs += [resuming(mesh, one if number is None else paths[number]) for mesh, number in RESUMED]
    whole = one_process(epochs(2))
    for (name, _), records in zip(RESUMED, on_meshes(jobs)[len(SAVED) :], strict=True):
        assert_goes_on(records, whole, LAYOUTS[name])
    consolidate(paths[0], tmp_path / "whole.ckpt", weights_only=False)
    for path in (tmp_path / "whole.ckpt", paths[1]):
        assert_goes_on([one_process(epochs(2, checkpoint=path))], whole, Mesh())


@pytest.mark.slow
def test_slices_go_on_in_other_slices_in_none_and_in_one_process(tmp_path):
    folder, names = tmp_path / "folder", ["four slices", "zero 2", "ZeROStrategy"]
    whole = one_process(epochs(2))
    jobs = [saving("stages, tensor", "sharded", folder), *(resuming(name, folder) for name in names)]
    for name, records in zip(names, on_meshes(jobs)[1:], strict=True):
        assert_goes_on(records, whole, RESUMING[name])
    consolidate(folder, tmp_path / "joined.ckpt", weights_only=False)
    assert_goes_on([one_process(epochs(2, checkpoint=tmp_path / "joined.ckpt"))], whole, Mesh())


@pytest.mark.parametrize("mesh", ["stages, tensor", pytest.param("zero 3, tensor", marks=pytest.mark.slow)])
def test_of_what_the_tensor_axis_cuts_a_rank_writes_and_reads_its_part(tmp_path, mesh: str):
    """Query, key and value lie in one matrix [48, 16], of which each of 2 ranks has 8 rows of every 16."""
    path = tmp_path / "folder"
    [records] = on_meshes([saving(mesh, "sharded", path, read=True)])
    for record in records:
        assert {shape for name, shape in record.extra.items() if "qkv.weight" in name} == {(24, 16)}
        assert (24, 16) in record.extra.values() and (48, 16) not in record.extra.values()
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    matrices = [kind for kind in stored.values() if tuple(getattr(kind, "size", ())) == (48, 16)]
    assert len(matrices) == 3 * 4  # weights and two moments of four blocks
    for kind in matrices:
        assert {tuple(chunk.offsets) for chunk in kind.chunks} == {(row, 0) for row in range(0, 48, 8)}
        assert {tuple(chunk.sizes) for chunk in kind.chunks} == {(8, 16)}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("moment", ["at_end", "after"])
def test_every_layout_goes_on_from_every_other(tmp_path, kind: str, moment: str):
    whole = one_process(epochs(2))
    paths = {name: tmp_path / f"{i}.ckpt" for i, name in enumerate(LAYOUTS)}
    on_meshes([saving(name, kind, path, moment) for name, path in paths.items()], timeout=120.0)
    for path in paths.values():
        for name, records in zip(LAYOUTS, on_meshes([resuming(n, path) for n in LAYOUTS], timeout=120.0), strict=True):
            assert_goes_on(records, whole, LAYOUTS[name])
