"""The hub's ends of all ranks' lines: what is heard there, what is said, the first failure, of which all are told.

The one idea: a rank is there as long as its line is; one that died is seen when its line is read from. Left out: what
the hub makes of what it hears (``run_coordinator.py``).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, cast

from lightning_parallel.parameter_server.transport.sealed import AnyConnection


class WorkerConnections:
    """The hub's connections.

    Args:
        lines: the connection to each rank.

    Attributes:
        lines: those that have not ended.
        failure: the first failure, as the bytes of a ``Failure``.
    """

    def __init__(self, lines: Mapping[AnyConnection, int]) -> None:
        self.lines = dict(lines)
        self.failure: bytes | None = None

    def heard(self, timeout: float) -> Iterator[tuple[AnyConnection, int, tuple[Any, ...] | None]]:
        """Wait at most so many seconds; who said what, None if the line has ended."""
        for line in wait(cast(Any, list(self.lines)), timeout=timeout):
            assert isinstance(line, AnyConnection)
            if line not in self.lines:
                continue  # it ended with another of its island just now
            try:
                message: tuple[Any, ...] | None = pickle.loads(line.recv_bytes())
            except (EOFError, OSError):
                message = None
            yield line, self.lines[line], message

    def say(self, rank: int, *words: Any) -> None:
        """Tell a rank something, if it is there."""
        for line in [line for line, other in self.lines.items() if other == rank]:
            with suppress(OSError):  # it died, which is seen when it is read from
                line.send_bytes(pickle.dumps(words))

    def fail(self, failure: bytes) -> None:
        """Tell everybody of the first failure of the run."""
        if self.failure is None:
            self.failure = failure
            for rank in list(self.lines.values()):
                self.say(rank, "failed", failure)
