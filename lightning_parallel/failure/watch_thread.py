"""The thread of a rank's watch: it beats, judges and ends.

The one idea: whatever the main thread is blocked in, this thread says that the rank lives and what it waits for, learns
of failures (its own rank's from an outbox), and frees or ends a main thread that does not end by itself.
"""

import os
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist

from lightning_parallel.errors import Failure, RemoteError, describe
from lightning_parallel.failure.aborts import Connections
from lightning_parallel.failure.ending import Ending
from lightning_parallel.failure.heartbeat_endpoint import ENDED, HeartbeatEndpoint, lost, not_heard_of
from lightning_parallel.failure.heartbeats import HeartbeatClient, HeartbeatServer
from lightning_parallel.failure.last_batch import LastBatch
from lightning_parallel.failure.main_thread import MainThreadProgress
from lightning_parallel.failure.messages import Status
from lightning_parallel.failure.patience import Patience
from lightning_parallel.failure.processes import this_process
from lightning_parallel.secret import Secret

_HINT_S = 0.5  # how long the launcher is given to say by which signal a process ended
SAID_S = 1.5  # how long a goodbye or a report may take to arrive
_BUSY_S = 0.05
_BLIND = "the watch of rank {} over the others has failed, so no failure of theirs would be seen: {}"
_live: "weakref.WeakSet[WatchThread]" = weakref.WeakSet()


class WatchThread:
    """What a watch's thread does, and what it shares with the main thread; its arguments are `Watch`'s."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store | None = None,
        *,
        host: str = "127.0.0.1",
        stage: int | None = None,
        patience: Patience | None = None,
        secret: Secret | None = None,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self.rank, self.world_size, self._stage = rank, world_size, stage
        self.waiting: str | None = None
        self.progress = 0
        self.secret = secret
        self.patience = patience or Patience()
        self.lost_hint: Callable[[int], str | None] = lambda rank: None
        self.failure: Failure | None = None
        self._process = this_process()
        self._own_error: BaseException | None = None
        self._told: BaseException | None = None  # what this process raises of the run's failure
        self._failed_at = self._leaving_since = self._next_beat = 0.0
        self.last_batch, self._is_asked = LastBatch(), False
        self._pulse = MainThreadProgress(self.patience.blocked_s / 2)
        self._ending = Ending(self.patience, exit)
        self._connections = Connections()
        self._ending.add(self._connections.shut)
        self._lock, self._known = threading.Lock(), threading.Event()
        self._outbox: list[bytes] = []
        self._parting, self._parted = False, threading.Event()
        self._stopping, self._stopped = False, threading.Event()
        self._party: HeartbeatEndpoint | None = None
        if world_size > 1:
            assert store is not None
            self._party = self._open(store, host)
            self._wake, self._woken = socket.socketpair()
            self._wake.setblocking(False)
            self._woken.setblocking(False)
            threading.Thread(target=self._run, name="lightning-parallel-watch", daemon=True).start()
        _live.add(self)

    def _open(self, store: dist.Store, host: str) -> HeartbeatEndpoint:
        key = f"watch/{store.add(f'watch/count/{self.rank}', 1)}"
        own = Status(self.rank, self._stage, self._process)
        if self.rank == 0:
            return HeartbeatServer(own, self.patience, self.world_size, self.secret).open(host, store, key)
        return HeartbeatClient(own, self.patience, self.world_size, self.secret).open(store, key)

    def _run(self) -> None:
        assert self._party is not None
        try:
            while not self._turn(self._party):
                pass
        except BaseException as error:
            if not self._stopping:
                self._end_without(error)
        finally:
            self._parted.set()
            self._stopped.set()
            self._close()

    def _end_without(self, error: BaseException) -> None:
        """The watch itself has failed: nothing would find out about other ranks, so this one does not go on."""
        traceback.print_exc()
        text = "".join(traceback.format_exception(error))
        told = RemoteError(type(error).__name__, str(error), text)
        mine = Failure(self.rank, self._stage, "", told, text, _BLIND.format(self.rank, describe(told)))
        try:
            self._take(mine)
            with suppress(Exception):
                assert self._party is not None
                self._party.report(self._party.packed(mine))
            while not self._stopping and not self._ending.is_due(time.monotonic() - self._failed_at):
                self._woken_or(_BUSY_S)
            why = "" if self._stopping else "".join(traceback.format_exception(self._raisable(mine)))
        except BaseException:
            why = text
        if not self._stopping:
            self._ending.end(self.rank, why)

    def _woken_or(self, seconds: float) -> None:
        with suppress(OSError):
            self._woken.setblocking(True)
            self._woken.settimeout(seconds)
            self._woken.recv(4096)

    def _turn(self, party: HeartbeatEndpoint) -> bool:
        """One turn of the thread's loop; whether it was the last."""
        now = time.monotonic()
        self._beat(party, now)
        while self._outbox:
            party.report(self._outbox.pop(0))
        self._agree(party)
        if party.failure is None:
            self._judge(party, now)
        if party.failure is not None:
            self._take(party.failure)
        if self._parting and party.part():
            self._parted.set()
        if self._stopping:
            return self._leave(party, now)
        if self.failure is not None and self._ending.is_due(now - self._failed_at):
            self._ending.end(self.rank, "".join(traceback.format_exception(self._raisable(self.failure))))
            self._stopping = True
        busy = self.failure is not None or party.gone() is not None
        party.poll(_BUSY_S if busy else max(0.0, self._next_beat - now), self._woken)
        return False

    def _beat(self, party: HeartbeatEndpoint, now: float) -> None:
        waiting = self.waiting
        still = self._pulse.still(self.progress, waiting, now)
        if now >= self._next_beat:
            self._next_beat = now + self.patience.beat_s  # first, since setting `stage` takes it back
            waits_for = None if waiting is None else str(waiting)
            last, asked_by = self.last_batch, self.last_batch.asked_by
            party.beat(
                Status(
                    self.rank, self._stage, self._process, waits_for, still,
                    -1 if asked_by is None else asked_by, last.said(), last.last,
                )
            )  # fmt: skip

    def _agree(self, party: HeartbeatEndpoint) -> None:
        """On the last batch, if a rank was told to end: rank 0 hears all numbers, and tells the greatest."""
        last, others = self.last_batch, [peer.status for peer in party.peers.values()]
        before = last.asked_by, last.last
        asking = [self.rank] if self._is_asked else [status.asked_by for status in others if status.asked_by >= 0]
        if last.asked_by is None and asking:
            last.ask(asking[0])
        if last.asked_by is None or last.last >= 0:
            return
        if self.rank:
            begun = [status.last for status in others if status.last >= 0]
        else:
            begun = [last.said(), *(status.begun for status in others if status.begun >= 0)]
            begun = begun if len(begun) == self.world_size else []
        if begun:
            last.settle(begun)
        if before != (last.asked_by, last.last):
            self._next_beat = 0.0  # at once

    def _judge(self, party: HeartbeatEndpoint, now: float) -> None:
        failure, gone = party.judge(now), party.gone()
        if gone is not None and gone.gone_since is not None:
            hint, silent_s = self.lost_hint(gone.status.rank), gone.gone_since - gone.heard
            if silent_s > self.patience.stale_s / 2:  # somebody else found that it was stopped, and ended it
                failure = lost(gone.status.rank, gone.status.stage, not_heard_of(silent_s))
            elif gone.line.fault is not None:
                failure = lost(gone.status.rank, gone.status.stage, f"its connection sent {gone.line.fault}")
            elif hint is not None or now - gone.gone_since > _HINT_S:
                why = f"{ENDED} ({hint or 'killed, or out of memory'})"
                failure = lost(gone.status.rank, gone.status.stage, why)
        if failure is not None:
            party.learn(failure, party.packed(failure))

    def _leave(self, party: HeartbeatEndpoint, now: float) -> bool:
        """Say goodbye once; rank 0 then stays for those that have not, until its process ends."""
        if not party.finished:
            party.leave()
            self._leaving_since = now
        if party.settled() or now - self._leaving_since > SAID_S:
            self._stopped.set()
        party.poll(self.patience.beat_s if self._stopped.is_set() else _BUSY_S, self._woken)
        return self._stopped.is_set() and party.alone()

    def _take(self, failure: Failure) -> None:
        with self._lock:
            if self.failure is None:
                self.failure, self._failed_at = failure, time.monotonic()
                self._known.set()
                self._parted.set()

    def _raisable(self, failure: Failure) -> BaseException:
        with self._lock:
            if self._told is None:
                is_own = self._own_error is not None and failure.rank == self.rank and failure.error is not None
                if is_own:
                    failure = replace(failure, error=self._own_error, traceback_text="")
                ranks = range(self.world_size) if failure.rank is not None else ()
                self._told = failure.to_error([rank for rank in ranks if rank != failure.rank], is_own)
            return self._told

    def _nudge(self) -> None:
        if self._party is not None:
            with suppress(OSError):
                self._wake.send(b"x")

    def _abandon(self) -> None:
        """In a forked process (a loader's worker), whose copy of a connection would hide the end of this rank."""
        self._stopping = True
        self._stopped.set()
        self._connections.forget()
        self._close()

    def _close(self) -> None:
        if self._party is not None:
            self._party.close()
            self._wake.close()
            self._woken.close()


def _forget_in_child() -> None:
    for watch in list(_live):
        watch._abandon()


os.register_at_fork(after_in_child=_forget_in_child)
