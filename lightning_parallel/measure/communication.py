"""What moves between ranks while it is watched: bytes and seconds by collective, axis and phase.

The one idea: everybody calls torch.distributed by name, so for the length of a measured step these names stand for
functions that count and time. Bytes are of the whole vector, as the papers count, whatever the backend sends for it.
Sends of one rank to another are those of a pipeline. Left out: collectives that C++ calls by itself, as
DistributedDataParallel's are, and a pipeline's sends on GPUs, which go by no name of torch.distributed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Key = tuple[str, str, str]  # axis, collective, phase
_IN_OUTPUT = {"all_gather_into_tensor", "all_gather_single"}
_NAMES = {
    "all_reduce": "all_reduce", "broadcast": "broadcast", "all_gather": "all_gather", "reduce": "reduce",
    "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter", "isend": "send",
}  # fmt: skip


class Moved(NamedTuple):
    """Calls, bytes and seconds of one kind of collective in one phase on one axis."""

    calls: int
    nbytes: int
    seconds: float


@dataclass(eq=False)
class _Call:
    key: Key
    nbytes: int
    seconds: Callable[[], float]


class CommunicationWatch:
    """A context in which collectives are counted and timed.

    Args:
        axis_of: names the axis that a process group (None: the default one) lies along.

    Attributes:
        phase: what the step is doing, to be set as it goes.
    """

    def __init__(self, axis_of: Callable[[Any], str] = lambda group: "data") -> None:
        self.axis_of, self.phase = axis_of, "forward"
        self._calls: list[_Call] = []
        self._before: dict[str, Any] = {}
        self._depth = 0

    def __enter__(self) -> CommunicationWatch:
        self._before = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}
        for name, function in self._before.items():
            setattr(dist, name, partial(self._call, name, function))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)
        self._before = {}

    def moved(self) -> dict[Key, Moved]:
        """What moved since the last call, and forget it; waits for what is still on its way."""
        calls, self._calls = self._calls, []
        return add_up((call.key, Moved(1, call.nbytes, call.seconds())) for call in calls)

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._depth += 1  # one name may call another
        try:
            begun = _begin(_tensor_in(args, kwargs))
            result = function(*args, **kwargs)
        finally:
            self._depth -= 1
        if not self._depth:
            axis = "pipeline" if name == "isend" else self.axis_of(kwargs.get("group"))
            key = (axis, _NAMES[name], self.phase)
            result, seconds = begun(result)
            self._calls.append(_Call(key, _size(name, args, kwargs), seconds))
        return result


def add_up(entries: Iterable[tuple[Key, Moved]]) -> dict[Key, Moved]:
    """The sums of what moved, by key.

    Example:
        >>> key = ("data", "all_gather", "step")
        >>> add_up([(key, Moved(1, 8, 0.5)), (key, Moved(1, 8, 0.25))])
        {('data', 'all_gather', 'step'): Moved(calls=2, nbytes=16, seconds=0.75)}
    """
    sums: dict[Key, Moved] = {}
    for key, moved in entries:
        before = sums.get(key, Moved(0, 0, 0.0))
        sums[key] = Moved(*(a + b for a, b in zip(before, moved, strict=True)))  # type: ignore[arg-type]
    return sums


def volume(moved: Mapping[Key, Moved], axis: str = "data") -> dict[str, int]:
    """Bytes of states on an axis by collective: reduce-scatters and all-gathers; the rest is logging and the like."""
    kinds = ("reduce_scatter", "all_gather")
    return {kind: sum(m.nbytes for (a, c, _), m in moved.items() if (a, c) == (axis, kind)) for kind in kinds}


def _size(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    tensors = [a for a in [*args, *kwargs.values()] if isinstance(a, Tensor)]
    lists = [a for a in [*args, *kwargs.values()] if isinstance(a, (list, tuple))]
    if lists:
        return sum(tensor.nbytes for tensor in lists[0] if isinstance(tensor, Tensor))
    return max((tensor.nbytes for tensor in tensors), default=0)


def _tensor_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    return next((a for a in [*args, *kwargs.values()] if isinstance(a, Tensor)), None)


class _TimedWork:
    """What an asynchronous call returned; notes when somebody has waited for it."""

    def __init__(self, work: Any) -> None:
        self._work, self.end = work, 0.0

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        self.end = self.end or time.perf_counter()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


Begun = Callable[[Any], tuple[Any, Callable[[], float]]]


def _begin(tensor: Tensor | None) -> Begun:
    """Start a clock. Given what the call returned: what to return for it, and what tells the seconds it took."""
    if tensor is not None and tensor.device.type == "cuda":
        return _begin_on_device(tensor.device)
    start = time.perf_counter()

    def returned(work: Any) -> tuple[Any, Callable[[], float]]:
        if work is None:
            seconds = time.perf_counter() - start
            return None, lambda: seconds
        timed = _TimedWork(work)
        return timed, lambda: max(0.0, timed.end - start)

    return returned


def _begin_on_device(device: torch.device) -> Begun:
    """The same in the time of the device: from what was launched before to the end of the collective."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record(torch.cuda.current_stream(device))

    def returned(work: Any) -> tuple[Any, Callable[[], float]]:
        stream = torch.cuda.current_stream(device) if work is None else _side_stream(device)
        with torch.cuda.stream(stream):
            if work is not None:
                work.wait()
            events[1].record(stream)
        return work, lambda: _elapsed(*events)

    return returned


def _elapsed(start: Any, end: Any) -> float:
    end.synchronize()
    return start.elapsed_time(end) / 1e3


_side_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]
