"""A wait for other ranks, as the watch sees it.

The one idea: what a main thread waits for is set on the way in and taken back on the way out, without a generator, as
hot loops come here. A failure on the way is the echo of another's, unless it is the run's own, told already.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from lightning_parallel.errors import raise_told

if TYPE_CHECKING:
    from lightning_parallel.failure.watch import Watch


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
