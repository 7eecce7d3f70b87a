"""A recorder of what a rank asks of torch.distributed: operation, group, bytes, in the order of the calls.

The one idea: every collective of Python's, whoever wrote it and under whichever name, ends in a method of a
`ProcessGroup`. These are replaced while somebody records; the package under test is not asked. A line says the
operation, what a reduction does, the group's global ranks, and bytes: of the whole vector where all ranks give as much
(all_reduce, broadcast), of a rank's own share where they give shares. Objects have no bytes, since a pickle's length
follows from versions and paths: what a function with "object" in its name sends is one. Left out: collectives that C++
calls by itself (DTensor's functional ones), tags.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# By method: the operation, and which argument has the tensors that count.
METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter", 0),
    "reduce_scatter_single": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "barrier": ("barrier", 0),
    "monitored_barrier": ("barrier", 0),
}
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class Calls:
    """The lines of one rank, by part of the run.

    Attributes:
        parts: by the name given to `enter`, what was called from there on.
    """

    def __init__(self) -> None:
        self.parts: dict[str, list[str]] = {}
        self._lines: list[str] = []

    def enter(self, part: str) -> None:
        """From here on lines belong to this part."""
        self._lines = self.parts.setdefault(part, [])

    def note(self, line: str, once: bool = False) -> None:
        """Add a line; or, `once`, only if it is not that of the last call."""
        if not once or self._lines[-1:] != [line]:
            self._lines.append(line)


@contextmanager
def recorded() -> Iterator[Calls]:
    """While the context is entered, everything that this process calls is noted."""
    calls, before = Calls(), {}
    for name in METHODS:
        if hasattr(dist.ProcessGroup, name):
            before[name] = vars(dist.ProcessGroup)[name]  # what binds to a group; getattr gives what does not
            setattr(dist.ProcessGroup, name, _noted(name, getattr(dist.ProcessGroup, name), calls))
    try:
        yield calls
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


def _noted(name: str, method: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    @wraps(method)
    def noted(group: Any, *args: Any, **kwargs: Any) -> Any:
        line = _line(name, group, [*args, *kwargs.values()])
        if line:
            calls.note(line, once=line.endswith("an object"))  # which may take several messages
        return method(group, *args, **kwargs)

    return noted


def _line(name: str, group: Any, args: list[Any]) -> str:
    operation, place = METHODS[name]
    ranks = _ranks(group)
    tensors = list(_tensors(args[place])) if operation != "barrier" and len(args) > place else []
    objects = _object_call()
    if objects and operation not in ("send", "recv"):
        # torch tells an object's length (int64), then its bytes: the length stands for both.
        return f"{objects} [{_joined(ranks)}]" if any(t.dtype == torch.int64 for t in tensors) else ""
    words = [operation]
    if operation in ("send", "recv"):
        peer = next((ranks[a] for a in args[1:2] if isinstance(a, int)), None) if name != "recv_anysource" else None
        words.append(f"{'to' if operation == 'send' else 'from'} {'anybody' if peer is None else peer}")
    else:
        words += _reduction(args) if "reduce" in operation else []
        words += _root(operation, args, ranks)
        words.append(f"[{_joined(ranks)}]")
    if objects:
        words.append("an object")
    elif operation != "barrier":
        words.append(f"{sum(t.nbytes for t in tensors)} B")
    return " ".join(words)


def _reduction(args: list[Any]) -> list[str]:
    found = [getattr(a, "reduceOp", a) for a in args if hasattr(a, "reduceOp") or isinstance(a, dist.ReduceOp)]
    return [name.lower() for name in OPERATIONS for op in found[:1] if op == getattr(dist.ReduceOp, name)]


def _root(operation: str, args: list[Any], ranks: list[int]) -> list[str]:
    if operation not in ("broadcast", "reduce", "gather", "scatter"):
        return []
    told = [getattr(a, "rootRank", a) for a in args if hasattr(a, "rootRank") or isinstance(a, int)]
    way = "from" if operation in ("broadcast", "scatter") else "to"
    return [f"{way} {ranks[root]}" for root in told[:1]]


def _ranks(group: Any) -> list[int]:
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # a group that torch does not keep
        return list(range(group.size()))


def _joined(ranks: list[int]) -> str:
    return " ".join(map(str, ranks))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _object_call() -> str:
    """The function for objects that is under way, torch's or another, or nothing."""
    frame = sys._getframe(3)
    for _ in range(4):
        if frame is None:
            break
        if "object" in frame.f_code.co_name:
            return frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return ""
