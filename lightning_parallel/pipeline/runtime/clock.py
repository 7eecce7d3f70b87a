"""Time of every action of a rank, on a clock that all ranks of a host share.

The one idea: the engine calls `mark()` where an action begins, has its inputs, and ends; a mark is a `perf_counter` on
CPU and an event on the compute stream on CUDA, read a step later, when it has long happened, so that nothing waits for
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments; `read` turns marks of a finished step into seconds."""

    def begin(self) -> None: ...

    def mark(self) -> Any: ...

    def read(self, marks: Sequence[Any]) -> list[float] | None: ...

    def forget(self, marks: Sequence[Any]) -> None: ...

    def seconds_at(self, moment: Any) -> float: ...


class HostClock:
    """`time.perf_counter`: the monotonic clock of the host, one for all its processes."""

    def begin(self) -> None:
        """A step begins."""

    def mark(self) -> float:
        return time.perf_counter()

    def read(self, marks: Sequence[float]) -> list[float]:
        return list(marks)

    def forget(self, marks: Sequence[float]) -> None:
        """Nobody will read these marks."""

    def seconds_at(self, moment: float) -> float:
        return moment


class CudaClock:
    """CUDA events on the current stream, tied to the host's clock by an anchor taken while the device was idle."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[torch.cuda.Event] = []
        self._anchor = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_seconds = time.perf_counter()
        self.begin()

    def begin(self) -> None:
        """A step begins: its marks lie on the stream that is current now."""
        self._stream = torch.cuda.current_stream(self.device)

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[float] | None:
        """Seconds on the host's clock, or None while the last mark has not happened. Read marks are used again.

        A mark may stand several times in the list, but the last one only at the end.
        """
        if marks and not marks[-1].query():
            return None
        at = {mark: self._anchor_seconds + self._anchor.elapsed_time(mark) / 1e3 for mark in dict.fromkeys(marks)}
        seconds = [at[mark] for mark in marks]
        if marks:  # the last mark becomes the anchor: elapsed_time is a float32 and would lose microseconds in minutes
            self._free.append(self._anchor)
            self._anchor, self._anchor_seconds = marks[-1], seconds[-1]
            self._free.extend(mark for mark in at if mark is not self._anchor)
        return seconds

    def forget(self, marks: Sequence[torch.cuda.Event]) -> None:
        """Nobody will read these marks: they are used again."""
        self._free.extend(dict.fromkeys(marks))

    def seconds_at(self, moment: torch.cuda.Event | float) -> float:
        """Of somebody else's event that has happened, or of a moment of the host: seconds on the host's clock."""
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        return self._anchor_seconds + self._anchor.elapsed_time(moment) / 1e3


def make_clock(device: torch.device) -> Clock:
    """The clock for a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
