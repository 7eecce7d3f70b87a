"""Files of checkpoints: written whole or not at all, and read as they are used."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lightning_parallel.checkpoint import files

VALUE = {"state_dict": {"w": torch.arange(6.0)}, "optimizer_states": [torch.ones(2)], "loops": {"at": torch.ones(1)}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "a.ckpt"
    files.write(VALUE, path)
    return path


def test_a_file_is_written_whole_and_leaves_nothing_else(path: Path):
    assert [entry.name for entry in path.parent.iterdir()] == ["a.ckpt"]
    torch.testing.assert_close(torch.load(path), VALUE)
    with suppress(RuntimeError), files.written_whole(path) as part:
        part.write_bytes(b"half")
        raise RuntimeError
    assert [entry.name for entry in path.parent.iterdir()] == ["a.ckpt"]
    torch.testing.assert_close(torch.load(path), VALUE)


def test_tensors_are_put_where_the_reader_says(path: Path):
    assert files.read(path)["state_dict"]["w"].device.type == "cpu"
    assert files.read(path, "meta")["state_dict"]["w"].is_meta
    assert files.read_checkpoint(path, "meta")["loops"]["at"].is_meta


def test_what_loops_keep_outlives_the_file(path: Path):
    """Weights and optimizer states lie in the file, which whoever saves next writes to; the rest does not."""
    read, kept = files.read(path), files.read_checkpoint(path)
    torch.testing.assert_close(kept, VALUE)
    assert kept["loops"]["at"].untyped_storage().nbytes() == VALUE["loops"]["at"].nbytes
    assert kept["loops"]["at"].data_ptr() != read["loops"]["at"].data_ptr()


def test_what_is_no_checkpoint_of_ours_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*none\.ckpt"):
        files.read(tmp_path / "none.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    assert files.read_checkpoint(tmp_path / "list.ckpt") == [1, 2]
    with pytest.raises(ValueError, match="no mapping"):
        files.refuse_foreign([1, 2], tmp_path / "list.ckpt")
    (tmp_path / "half.ckpt").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(ValueError, match=r"half\.ckpt"):
        files.read(tmp_path / "half.ckpt")
