"""Calls between ranks while somebody listens: which, over which group, how many bytes, from when to when.

The one idea: everybody calls torch.distributed by name, and a pipeline's channels ask one attribute. While there are
listeners these names stand for functions that time; else they are what they always were. Bytes are of the whole
vector, as the papers count, whatever the backend sends for it. Left out: collectives that C++ calls by itself, as
DistributedDataParallel's are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.pipeline.transport.channel import Channel

_NAMES = {
    "all_reduce": "all_reduce", "broadcast": "broadcast", "all_gather": "all_gather", "reduce": "reduce",
    "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
}  # fmt: skip


@dataclass(eq=False)
class CommunicationCall:
    """One call.

    Attributes:
        operation: the collective, or "send" or "recv".
        place: the process group (None: the default one) of a collective, the `Channel` of a transfer.
        nbytes: of the whole vector, or of what is transferred.
        begin, end: moments: seconds of `time.perf_counter` for tensors of the host, events on CUDA. On the host the
            end of what runs on by itself is when somebody has waited for it; None as long as nobody has.
    """

    operation: str
    place: Any
    nbytes: int
    begin: Any
    end: Any = None

    def seconds(self) -> float:
        """How long it took, 0 where nobody has waited for it."""
        if self.end is None or isinstance(self.begin, float):
            return 0.0 if self.end is None else float(self.end - self.begin)
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end) / 1e3)


Listener = Callable[[CommunicationCall], None]
_listeners: list[Listener] = []
_before: dict[str, Any] = {}
_depth = 0


def listen(listener: Listener) -> None:
    """Tell a listener of every call from here on."""
    _listeners.append(listener)
    if len(_listeners) > 1:
        return
    _before.update({name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)})
    for name, function in _before.items():
        setattr(dist, name, partial(_collective, name, function))
    Channel.observer = _transfer


def stop(listener: Listener) -> None:
    """Tell it no more; with the last listener all names are what they were."""
    _listeners.remove(listener)
    if _listeners:
        return
    for name, function in _before.items():
        setattr(dist, name, function)
    _before.clear()
    Channel.observer = None


def _collective(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _depth
    if _depth:  # one name may call another
        return function(*args, **kwargs)
    _depth += 1
    try:
        tensor = next((a for a in [*args, *kwargs.values()] if isinstance(a, Tensor)), None)
        call = CommunicationCall(_NAMES[name], _group_in(args, kwargs), _size(args, kwargs), _now(tensor))
        return _run(call, tensor, partial(function, *args, **kwargs))
    finally:
        _depth -= 1


def _transfer(channel: Channel, operation: str, payload: Tensor, start: Callable[[Tensor], Any]) -> Any:
    call = CommunicationCall(operation, channel, payload.nbytes, _now(payload))
    return _run(call, payload, partial(start, payload))


def _run(call: CommunicationCall, tensor: Tensor | None, function: Callable[[], Any]) -> Any:
    result = function()
    if tensor is not None and tensor.is_cuda:
        call.end = _end_on_device(tensor.device, result)
    elif result is None:
        call.end = time.perf_counter()
    else:
        result = _TimedWork(result, call)
    for listener in _listeners:
        listener(call)
    return result


def _now(tensor: Tensor | None) -> Any:
    if tensor is None or not tensor.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _end_on_device(device: torch.device, work: Any) -> Any:
    """An event at the end of a call; a stream beside waits for what runs on by itself."""
    event = torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(device) if work is None else _side_stream(device)
    with torch.cuda.stream(stream):
        if work is not None:
            work.wait()
        event.record(stream)
    return event


class _TimedWork:
    """What an asynchronous call returned; notes when somebody has waited for it."""

    def __init__(self, work: Any, call: CommunicationCall) -> None:
        self._work, self._call = work, call

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        self._call.end = self._call.end or time.perf_counter()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    tensors = [a for a in [*args, *kwargs.values()] if isinstance(a, Tensor)]
    lists = [a for a in [*args, *kwargs.values()] if isinstance(a, (list, tuple))]
    if lists:
        return sum(tensor.nbytes for tensor in lists[0] if isinstance(tensor, Tensor))
    return max((tensor.nbytes for tensor in tensors), default=0)


def _group_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The process group that a collective was given, by name or by place; None is the default one."""
    if "group" in kwargs:
        return kwargs["group"]
    return next((a for a in args if isinstance(a, dist.ProcessGroup)), None)


_side_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]
