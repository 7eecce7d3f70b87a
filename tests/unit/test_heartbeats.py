"""Who is stuck, judged from what ranks have said."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_parallel.errors import Failure
from lightning_parallel.failure.framed_socket import FramedSocket
from lightning_parallel.failure.heartbeat_endpoint import Peer
from lightning_parallel.failure.heartbeats import _REMEDY, HeartbeatClient, HeartbeatServer
from lightning_parallel.failure.messages import Status
from lightning_parallel.failure.patience import Patience
from lightning_parallel.handshake import SessionKeys
from lightning_parallel.secret import Secret

NOBODY = ("", 0)
WAITS = Status(1, 0, NOBODY, "the other stages, to compare notes", 38.0)


def ends() -> tuple[FramedSocket, FramedSocket]:
    """Both ends of a line whose ends have proven themselves."""
    ours, theirs = socket.socketpair()
    return FramedSocket(ours, SessionKeys(b"ours", b"theirs")), FramedSocket(theirs, SessionKeys(b"theirs", b"ours"))


@pytest.fixture
def hub() -> Iterator[tuple[HeartbeatServer, FramedSocket]]:
    """Rank 0, and rank 1's end of its line."""
    ours, line = ends()
    hub = HeartbeatServer(Status(0, 1, NOBODY), Patience(beat_s=0.0), world_size=2)
    hub.peers[1] = Peer(ours, Status(1, 0, NOBODY), hub.looked)
    yield hub, line
    hub.peers[1].line.close()
    line.close()


def hears(hub: HeartbeatServer) -> None:
    hub.looked = time.monotonic()
    hub._listen_to(hub.peers[1])


def test_a_rank_that_waited_until_the_other_one_ended_is_not_stuck(hub: tuple[HeartbeatServer, FramedSocket]):
    """Its last sign of life is from before; if it still waits it says so with the next one."""
    rank_0, line = hub
    line.send("beat", WAITS)
    hears(rank_0)
    assert rank_0.stuck() is None, "rank 0 computes"
    rank_0.leave()
    assert rank_0.stuck() is None
    line.send("beat", WAITS)
    hears(rank_0)
    failure = rank_0.stuck()
    assert failure is not None
    assert failure.headline.splitlines() == [
        "every rank has waited for another one for 38 s, for what will not come:",
        "  stage 1 (rank 0): has finished",
        "  stage 0 (rank 1): the other stages, to compare notes",
        _REMEDY,
    ]


def test_ranks_part_when_the_last_has_come(hub: tuple[HeartbeatServer, FramedSocket]):
    rank_0, line = hub
    assert not rank_0.part()
    line.send("done")
    hears(rank_0)
    assert rank_0.part() and line.receive() == [("done", None)]


@pytest.mark.parametrize(("silent", "is_lost"), [(0.95, False), (1.0, True)])
def test_a_rank_of_another_host_may_be_silent_for_all_of_the_patience(hub, silent: float, is_lost: bool):
    """Whether it computes cannot be seen from here, so its silence alone counts: not before `stale_s`."""
    rank_0, _ = hub
    peer, patience = rank_0.peers[1], rank_0.patience
    peer.status = Status(1, 0, ("another host", 1))
    failure = rank_0.silence(peer.heard + silent * patience.stale_s)
    assert (failure is not None) == is_lost
    if failure is not None:
        assert failure.headline == "lost rank 1 (stage 0): not heard of for 12 s (stopped, or its host is gone)"


def test_a_rank_that_has_finished_may_be_silent(hub: tuple[HeartbeatServer, FramedSocket]):
    rank_0, _ = hub
    rank_0.peers[1].status, rank_0.peers[1].finished = Status(1, 0, ("another host", 1)), True
    assert rank_0.silence(rank_0.peers[1].heard + 2 * rank_0.patience.stale_s) is None


def test_rank_0_is_alone_once_everybody_has_left_or_is_cut_off(hub: tuple[HeartbeatServer, FramedSocket]):
    rank_0, line = hub
    assert not rank_0.alone(), "rank 1 is there"
    rank_0.peers[1].finished = True
    assert rank_0.alone(), "it said goodbye"
    rank_0.peers[1].finished = False
    line.close()
    hears(rank_0)
    assert rank_0.alone(), "its connection has ended"
    rank_0.world_size = 3
    assert not rank_0.alone(), "rank 2 has not come yet"


def test_whoever_was_stopped_itself_does_not_blame_others(hub: tuple[HeartbeatServer, FramedSocket]):
    rank_0, _ = hub
    peer, stale_s = rank_0.peers[1], rank_0.patience.stale_s
    peer.status = Status(1, 0, ("another host", 1))
    now = time.monotonic()
    peer.heard, rank_0.looked = now - 2 * stale_s, now - stale_s / 4
    rank_0._excuse_own_sleep()
    assert rank_0.silence(now) is not None, "rank 0 has looked all the time"
    rank_0.looked = now - stale_s
    rank_0._excuse_own_sleep()
    assert rank_0.silence(now) is None and peer.heard >= now


@pytest.mark.parametrize("secret", [None, Secret.make()])
def test_a_rank_that_comes_late_hears_what_it_missed(secret: Secret | None):
    """The first failure, and that rank 0 has left."""
    store, (wake, other) = dist.HashStore(), socket.socketpair()
    wake.setblocking(False)
    hub = HeartbeatServer(Status(0, 1, NOBODY), Patience(), 2, secret).open("127.0.0.1", store, "watch")
    hub.report(hub.packed(Failure(0, 1, headline="stage 1 (rank 0) failed")))
    hub.leave()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(HeartbeatClient(Status(1, 0, NOBODY), Patience(), 2, secret).open, store, "watch")
        deadline = time.monotonic() + 10
        while not hub.peers and time.monotonic() < deadline:
            hub.poll(0.1, wake)
    spoke = coming.result()
    while not (spoke.failure and spoke.peers[0].finished) and time.monotonic() < deadline:
        spoke.poll(0.1, wake)
    assert spoke.failure is not None and spoke.failure.headline == "stage 1 (rank 0) failed"
    assert spoke.peers[0].finished
    assert not hub.settled(), "rank 1's confirmations have not been heard"
    while not hub.settled() and time.monotonic() < deadline:
        hub.poll(0.1, wake)
    assert hub.settled()
    for end in (hub, spoke):
        end.close()
    for end_of_wake in (wake, other):
        end_of_wake.close()


def test_a_message_ends_the_wait_for_messages():
    """It is heard when it comes, and not with the next sign of life."""
    (ours, line), (wake, other) = ends(), socket.socketpair()
    wake.setblocking(False)
    spoke = HeartbeatClient(Status(1, 0, NOBODY), Patience(), 2)
    spoke.peers[0] = Peer(ours, Status(0, 1, NOBODY), spoke.looked)
    line.send("done")
    began = time.monotonic()
    spoke.poll(30.0, wake)
    assert spoke.peers[0].done and time.monotonic() - began < 20.0
    for end in (spoke, line, wake, other):
        end.close()
