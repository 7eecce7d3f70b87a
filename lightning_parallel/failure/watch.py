"""Nothing hangs: a failure on any rank ends every rank, with the first failure as the reason all of them give.

The one idea: one thread a process on a connection of its own, since the main thread may be inside a receive that will
never end. A rank reports its exception; a rank that ended, fell silent, or waits in a circle is found
(``heartbeats.py``). Then each main thread has a grace to end by itself, then its connections are closed under it, then
the process ends (``ending.py``).

    main thread      F3 -- recv ......................... RuntimeError -> cause() -> the failure
    watch's thread   beat -- beat -- (1) failure known -- (2) grace_s: close connections -- (3) exit_s: os._exit(1)

Left out: restarting what failed; a rank that computes for ever without communicating.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from lightning_parallel.errors import Failure, StageError, raise_told
from lightning_parallel.failure.aborts import is_communication_error
from lightning_parallel.failure.watch_thread import SAID_S, WatchThread


class Blocked:
    """See `Watch.blocked`.

    Args:
        watch: of this rank.
        what: what is waited for, as in "F3 from rank 0".
    """

    __slots__ = ("_before", "_watch", "_what")

    def __init__(self, watch: Watch, what: str) -> None:
        self._watch, self._what = watch, what

    def __enter__(self) -> None:
        self._before, self._watch.waiting = self._watch.waiting, self._what

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.waiting = self._before
        self._watch.progress += 1
        if isinstance(error, RuntimeError):
            raise_told(self._watch.report_echo(error, f"waiting for {self._what}"), error)


class Watch(WatchThread):
    """Watches over the ranks of a run. Every rank makes one, in the same order, before it opens its process groups.

    Two plain attributes may be set at any time, also in a hot loop: ``waiting`` (what the main thread is blocked in, as
    in ``"F3 from rank 0"``, or None) and ``progress`` (a number that changes as the rank gets on).

    Args:
        rank: global rank.
        world_size: number of ranks.
        store: any store that all ranks share; used once, to agree on rank 0's address.
        host: the name under which the other ranks reach rank 0's host.
        stage: pipeline stage of this rank, for messages.
        patience: how long to wait for what.
        secret: of the run; without one, other ranks' exceptions come as a `StageError` with their words, since whoever
            reaches the store could send one that runs code here.
        exit: ends the process, once it did not end by itself.
    """

    @property
    def stage(self) -> int | None:
        """Pipeline stage of this rank, for messages; rank 0 is told at once when it is set."""
        return self._stage

    @stage.setter
    def stage(self, stage: int | None) -> None:
        self._stage, self._next_beat = stage, 0.0
        self._nudge()

    def report(self, error: BaseException, where: str = "", headline: str = "") -> BaseException:
        """Tell all ranks of an exception and return what to raise. The first report of a run wins, on every rank.

        It is one object in a process, whoever asks: this rank's own exception, or that of another rank made again.

        A failure of communication is the echo of another one as a rule: that one is waited for first, as in `cause`.
        """
        return self._tell(error, where, is_communication_error(error), headline)

    def report_echo(self, error: BaseException, where: str) -> BaseException:
        """`report` of an error that came out of a wait for other ranks."""
        return self._tell(error, where, is_echo=True)

    def _tell(self, error: BaseException, where: str, is_echo: bool, headline: str = "") -> BaseException:
        if isinstance(error, StageError) or error is self._told:
            return error
        if self.failure is None and is_echo:
            self.cause()
        if self.failure is None:
            text = "".join(traceback.format_exception(error))
            self._publish(Failure(self.rank, self.stage, where, error, text, headline))
        assert self.failure is not None
        return self._raisable(self.failure)

    def _publish(self, mine: Failure) -> None:
        self._own_error = mine.error
        if self._party is not None and not self._stopped.is_set():
            self._outbox.append(self._party.packed(mine))
            self._nudge()
            self._known.wait(SAID_S)
        self._take(mine)  # alone, or rank 0 does not answer

    def cause(self, wait_s: float | None = None) -> BaseException | None:
        """Why communication failed here: the run's first failure, waited for briefly; None if nobody knows of one."""
        if self._party is not None:
            self._known.wait(self.patience.cause_s if wait_s is None else wait_s)
        return None if self.failure is None else self._raisable(self.failure)

    def blocked(self, what: str) -> Blocked:
        """A context for what may wait for other ranks: says so to the watch, and turns its failure into the cause."""
        return Blocked(self, what)

    def ask_to_end(self) -> None:
        """This rank was told to end, and all end with it behind the same batch; may be called by a signal handler."""
        self._is_asked, self._next_beat = True, 0.0
        self._nudge()

    @property
    def is_told_to_end(self) -> bool:
        """Whether this rank was told to end, or has heard that another one was."""
        if self._is_asked:
            self.last_batch.ask(self.rank)
        return self.last_batch.asked_by is not None

    def begin_batch(self) -> bool:
        """Whether to begin one more batch: not, where a rank was told to end and the last one of all is over."""
        last = self.last_batch
        if last.asked_by is None:
            return last.begin()
        with self.blocked("the other ranks, to end behind the same batch"):
            return last.begin(lambda: self.failure is not None)

    def on_abort(self, abort: Callable[[], object]) -> None:
        """Have a function called (in another thread) that frees a main thread still blocked after a failure."""
        self._ending.add(abort)

    def on_exit(self, end: Callable[[], object]) -> None:
        """Have a function called before the process is ended, if its main thread does not end by itself."""
        self._ending.last.append(end)

    def opening(self) -> AbstractContextManager[None]:
        """A context in which process groups are made: connections opened in it are shut once a failure is known."""
        return self._connections.opening()

    def part(self) -> None:
        """Wait until every rank has come to the end of its run, so that none ends well where another one fails.

        Raises:
            Exception: the failure of the run, if it has failed.
        """
        if self._party is None:
            return
        self._parting = True
        self._nudge()
        with self.blocked("the other ranks to come to the end of the run"):
            self._parted.wait()
        if self.failure is not None:
            error = self._raisable(self.failure)
            raise error from error.__cause__

    def stop(self) -> None:
        """End the watch. Ranks may stop at different times; one that has stopped is missed by nobody."""
        if not self._stopping:
            self._stopping = True
            self._nudge()
            if self._party is not None:
                self._stopped.wait(2 * SAID_S)
            self._stopped.set()
