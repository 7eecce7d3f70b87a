"""What is said when processes of a job have ended."""

from types import SimpleNamespace

import pytest

from lightning_parallel.parameter_server import Layout, Rules
from lightning_parallel.parameter_server.hosting import Hosting


def lost(replicas: int, manager: int | None = None, gone: tuple[str, ...] = ()) -> str | None:
    job = SimpleNamespace(rules=Rules(Layout(1), replicas=replicas))
    started = SimpleNamespace(job=job, processes={"manager": SimpleNamespace(exitcode=manager)})
    return Hosting(started, _gone=set(gone)).lost


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_manager_that_has_ended_is_no_reason_for_more_replicas(replicas):
    said = lost(replicas, manager=-9)
    assert said is not None and said.startswith("The manager's process has ended") and "replication=2" not in said


def test_a_server_that_has_ended_is_named_with_its_remedy():
    assert lost(2, gone=("s0.ab",)) is None is lost(1)
    assert "The process of server s0 has ended" in lost(1, gone=("s0.ab",))
    assert "with replication=2 or more a server may die" in lost(1, gone=("s0.ab",))
