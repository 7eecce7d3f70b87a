"""A rank that resumes from a folder reads the part of it that it will hold, on any number of ranks."""

import copy
import importlib.util
import io
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_parallel.checkpoint.sharded import load_sharded, save_sharded
from lightning_parallel.checkpoint.slices import TensorSlice
from lightning_parallel.parallel.shares import ShardMap
from tests.harness import run_ranks
from tests.trainer.modules import CLASSES, WIDTH, Classifier
from tests.trainer.test_zero_checkpoints import assert_like, loader, run, saves
from tests.trainer.zeros import Result, fit, on_ranks, zero

WIDE, LAYERS = 256, 6
A_TENSOR = 6 << 10  # bytes of headers, names and offsets that are read beside the values of each tensor


class Wide(Classifier):
    """Six large matrices and little else."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        blocks = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(LAYERS)]
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDE), *blocks, nn.Linear(WIDE, CLASSES))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


COUNTED: dict[str, int] = {}


class CountedFile(io.FileIO):
    """A file that adds up the bytes that are asked of the system."""

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        COUNTED[str(Path(str(self.name)).parent)] = COUNTED.get(str(Path(str(self.name)).parent), 0) + (count or 0)
        return count  # type: ignore[return-value]

    def readall(self) -> bytes:
        values = super().readall()
        COUNTED[str(Path(str(self.name)).parent)] = COUNTED.get(str(Path(str(self.name)).parent), 0) + len(values)
        return values


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes read by this process and those forked from it, by folder, of files that were opened for reading bytes."""
    opens = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "rb":
            return opens(path, mode, *args, **kwargs)
        return CountedFile(path) if kwargs.get("buffering") == 0 else io.BufferedReader(CountedFile(path))

    monkeypatch.setattr(Path, "open", opened)
    COUNTED.clear()
    return COUNTED


def reads(folder: Path) -> Any:
    return lambda trainer, module: COUNTED.get(str(folder), 0)


@pytest.fixture(scope="module")
def uninterrupted() -> Result:
    return fit(run(4, make=Wide), "auto", 1)


STAGES = {"native": (1, 2), "fsdp2": (2, 3), "deepspeed": (1, 2, 3)}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranks", "engine"),
    [
        (2, "fsdp2"),
        *(pytest.param(n, e, marks=pytest.mark.slow) for n in (2, 4) for e in STAGES if (n, e) != (2, "fsdp2")),
    ],
)
def test_a_rank_reads_its_share(
    tmp_path: Path, counted: dict[str, int], uninterrupted: Result, ranks: int, engine: str
):
    """Weights that are held whole, 4P, else 4P/N; 8P/N of Adam's moments; and at most 6 KiB a tensor of the folder."""
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    folder = tmp_path / "folder"
    on_ranks([(run(2, saves(folder), make=Wide), zero(2, state_dict_type="sharded"))], 2, timeout=110.0)
    jobs: list[Any] = [(run(4, reads(folder), folder, Wide), zero(stage, engine=engine)) for stage in STAGES[engine]]
    parameters = [p.numel() for p in Wide().parameters()]
    before = [0] * ranks
    for stage, results in zip(STAGES[engine], on_ranks(jobs, ranks, timeout=110.0), strict=True):
        divided = engine == "fsdp2" or stage == 3
        share = (4 / (ranks if divided else 1) + 8 / ranks) * sum(parameters)
        assert_like(results, uninterrupted, slice(2, None))
        counts = [result.extra - earlier for result, earlier in zip(results, before, strict=True)]
        before = [result.extra for result in results]
        assert all(share < count < share + 4 * len(parameters) * A_TENSOR for count in counts), (share, counts)


def test_of_a_stored_tensor_only_what_is_used_is_read(tmp_path: Path, counted: dict[str, int]):
    matrix = torch.arange(90_000.0).view(300, 300)
    strided = torch.arange(36_000.0).view(6, 10, 20, 30).to(memory_format=torch.channels_last)
    state = {"matrix": matrix, "strided": strided, "half": matrix.bfloat16(), "small": torch.ones(3)}
    save_sharded({"state_dict": state}, list(state), tmp_path / "folder", lambda: None)
    stored = load_sharded(tmp_path / "folder", in_parts=True)["state_dict"]
    assert type(stored["small"]) is Tensor and torch.equal(stored["small"], state["small"])
    counted.clear()
    for begin, end in ((0, 1000), (500, 600), (89_990, 90_000), (7, 7)):
        assert torch.equal(stored["matrix"].flatten()[begin:end], matrix.flatten()[begin:end])
    assert counted[str(tmp_path / "folder")] < 4 * 1110 + 4 * A_TENSOR
    assert torch.equal(stored["half"].flatten()[-5:].clone(), state["half"].flatten()[-5:])
    assert torch.equal(stored["strided"].flatten()[100:200], strided.flatten()[100:200])
    assert torch.equal(stored["matrix"][2:4], matrix[2:4])  # anything else reads all
    assert torch.equal(stored["matrix"] + 1, matrix + 1)
    assert torch.equal(copy.deepcopy(stored["matrix"]), matrix)
    layer = nn.Linear(300, 300, bias=False)
    layer.load_state_dict({"weight": stored["matrix"]})
    assert torch.equal(layer.weight, matrix)


def test_of_a_tensor_in_slices_only_what_is_used_is_read(tmp_path: Path, counted: dict[str, int]):
    """As two ranks of a tensor axis write them: along dim 0 in three segments, and along dim 1 of three."""
    wholes = {"rows": torch.arange(90_000.0).view(300, 300), "columns": torch.arange(72_000.0).view(8, 300, 30)}
    cuts = {"rows": ShardMap((300, 300), 0, (100, 100, 100), 2), "columns": ShardMap((8, 300, 30), 1, (299, 1), 2)}

    def write(rank: int) -> None:
        def own(flat: dict[str, Any]) -> dict[str, Any]:
            return {n: TensorSlice(cuts[key := n[11:]], rank, cuts[key].cut(x, rank)) for n, x in flat.items()}

        save_sharded({"state_dict": wholes}, list(wholes), tmp_path / "folder", dist.barrier, own)

    run_ranks(write, 2)
    stored = load_sharded(tmp_path / "folder", in_parts=True)["state_dict"]
    counted.clear()
    ranges = {
        "rows": ((0, 1000), (14_990, 15_010), (89_990, 90_000), (7, 7)),
        "columns": ((0, 1000), (8_990, 9_010), (9_000, 18_000), (71_990, 72_000)),
    }
    for name, whole in wholes.items():
        for begin, end in ranges[name]:
            assert torch.equal(stored[name].flatten()[begin:end], whole.flatten()[begin:end])
    values = 1030 + 1000 + 2 * 9000 + 9000 + 10  # a range that touches two rows reads both
    assert counted[str(tmp_path / "folder")] < 4 * values + 24 * A_TENSOR
    assert torch.equal(stored["columns"] + 1, wholes["columns"] + 1)


class WithATest(Wide):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def evaluated_from(folder: Path) -> Any:
    options = {"weights_only": False} if "weights_only" in signature(Trainer.test).parameters else {}

    def test(trainer: Any, module: Any) -> Any:
        trainer.save_checkpoint(folder)
        [after] = trainer.test(WithATest(), loader(), ckpt_path=folder, verbose=False, **options)
        return after, trainer.test(module, loader(), verbose=False)

    return test


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "fsdp2"])
def test_another_module_is_tested_from_a_folder(tmp_path: Path, engine: str):
    stage = 3 if engine == "fsdp2" else 2
    strategy = zero(stage, engine=engine, state_dict_type="sharded")
    [results] = on_ranks([(run(2, evaluated_from(tmp_path / "folder"), make=WithATest), strategy)], 2)
    for result in results:
        after, [trained] = result.extra
        assert after == trained


def test_a_file_that_ends_too_early(tmp_path: Path):
    save_sharded({"state_dict": {"w": torch.ones(300, 300)}}, ["w"], tmp_path / "folder", lambda: None)
    stored = load_sharded(tmp_path / "folder", in_parts=True)["state_dict"]["w"]
    [file] = (tmp_path / "folder").glob("*.distcp")
    with file.open("r+b") as opened:
        opened.truncate(1000)
    with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged, or no file of a sharded checkpoint: "):
        stored.flatten()[50_000:60_000]
