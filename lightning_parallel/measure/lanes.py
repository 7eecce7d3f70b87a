"""What ranks say to each other in a step, as lanes beside what they compute: one for each axis of the mesh.

The one idea: a lane holds measured calls on the clock of the actions. A value of a pipeline is under way from the
moment at which it was sent to the moment at which the next action has it, so a receive begins no earlier than its
send, and a send ends with its receive; both ranks' records make the one span that both show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from lightning_parallel.measure.calls import CommunicationCall, listen, stop
from lightning_parallel.pipeline.transport.channel import Channel

TRANSFERS = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective or transfer of a rank.

    Args:
        axis: of the mesh, such as "data"; several are joined by an x.
        operation: "all_reduce", "all_gather", ..., or "send" or "recv" of a pipeline.
        nbytes: of the whole vector, as papers count, or of what is transferred.
        start, end: seconds, on the clock of the step's spans.
        channel: source, target and number of the channel, of a send or recv; empty otherwise.
    """

    axis: str
    operation: str
    nbytes: int
    start: float
    end: float
    channel: tuple[int, ...] = ()


Lanes = tuple[tuple[Transfer, ...], ...]  # one entry a row of the schedule


class CallLog:
    """A context in which a rank's calls are kept.

    Args:
        axis_of: names the axis that a process group (None: the default one) lies along.
    """

    def __init__(self, axis_of: Callable[[Any], str]) -> None:
        self._axis_of, self._calls = axis_of, list[CommunicationCall]()

    def __enter__(self) -> CallLog:
        listen(self._calls.append)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop(self._calls.append)

    def transfers(self, at: Callable[[Any], float]) -> list[Transfer]:
        """What was called, in its order, on the clock that `at` reads moments by; without what only the host says."""
        named = [(self._axis(call), call) for call in self._calls]
        return [_transfer(axis, call, at) for axis, call in named if axis != "host"]

    def _axis(self, call: CommunicationCall) -> str:
        return "pipeline" if isinstance(call.place, Channel) else self._axis_of(call.place)


def joined(rows: Sequence[Sequence[Transfer]]) -> Lanes:
    """The ranks' records with sends and receives of one value brought together."""
    sends, receives = (dict(_numbered(rows, operation)) for operation in TRANSFERS)

    def whole(key: Any, transfer: Transfer) -> Transfer:
        sent, taken = sends.get(key, transfer), receives.get(key, transfer)
        return replace(transfer, start=min(sent.start, taken.end), end=taken.end)

    found = {id(t): whole(key, t) for table in (sends, receives) for key, t in table.items()}
    return tuple(tuple(found.get(id(transfer), transfer) for transfer in row) for row in rows)


def axes_in(lanes: Iterable[Iterable[Transfer]]) -> list[str]:
    """The axes that occur, the pipeline's first."""
    found = {transfer.axis for row in lanes for transfer in row}
    return sorted(found, key=lambda axis: (axis != "pipeline", axis))


def _transfer(axis: str, call: CommunicationCall, at: Callable[[Any], float]) -> Transfer:
    begin = at(call.begin)
    place = call.place
    channel = (place.source, place.target, place.tag) if isinstance(place, Channel) else ()
    return Transfer(
        axis, call.operation, call.nbytes, begin, begin if call.end is None else max(begin, at(call.end)), channel
    )


def _numbered(rows: Sequence[Sequence[Transfer]], operation: str) -> Iterator[tuple[Any, Transfer]]:
    """Values travel through a channel in the order in which they were sent, and are received in it."""
    counts: dict[tuple[int, ...], int] = {}
    for row in rows:
        for transfer in row:
            if transfer.operation == operation:
                number = counts[transfer.channel] = counts.get(transfer.channel, 0) + 1
                yield (transfer.channel, number), transfer
