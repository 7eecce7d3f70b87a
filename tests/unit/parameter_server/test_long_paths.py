"""A folder for temporary files whose path is too long for a socket's: sockets lie in /tmp."""

import tempfile

from lightning_parallel.parameter_server.trainer.coordination.later_runs import folder
from lightning_parallel.parameter_server.transport.shared_files import make_folder, remove, temporary
from lightning_parallel.parameter_server.transport.zeromq import endpoint_in


def test_sockets_have_short_paths_whatever_the_folder(tmp_path, monkeypatch):
    long = tmp_path / ("a" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made, _ = make_folder()
    assert len(endpoint_in(made, "worker 1000.0123abcd").removeprefix("ipc://")) <= 107
    assert len(str(folder() / "65535-1000")) <= 107 and made.stat().st_mode & 0o777 == 0o700
    remove(made)
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert str(temporary(room=99)) == "/var/tmp"
    assert str(temporary(room=100)) == "/tmp"
