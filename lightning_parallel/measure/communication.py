"""What moves between ranks while it is watched: bytes and seconds by collective, axis and phase.

Sends of one rank to another are those of a pipeline. Left out: how calls are seen and timed, which is `calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from lightning_parallel.measure.calls import CommunicationCall, listen, stop

Key = tuple[str, str, str]  # axis, collective, phase


class Moved(NamedTuple):
    """Calls, bytes and seconds of one kind of collective in one phase on one axis."""

    calls: int
    nbytes: int
    seconds: float


class CommunicationWatch:
    """A context in which collectives are counted and timed.

    Args:
        axis_of: names the axis that a process group (None: the default one) lies along.

    Attributes:
        phase: what the step is doing, to be set as it goes.
    """

    def __init__(self, axis_of: Callable[[Any], str] = lambda group: "data") -> None:
        self.axis_of, self.phase = axis_of, "forward"
        self._calls: list[tuple[Key, CommunicationCall]] = []

    def __enter__(self) -> CommunicationWatch:
        listen(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop(self._note)

    def moved(self) -> dict[Key, Moved]:
        """What moved since the last call, and forget it; waits for what is still on its way."""
        calls, self._calls = self._calls, []
        return add_up((key, Moved(1, call.nbytes, call.seconds())) for key, call in calls)

    def _note(self, call: CommunicationCall) -> None:
        if call.operation != "recv":  # what one rank receives another has sent
            axis = "pipeline" if call.operation == "send" else self.axis_of(call.place)
            self._calls.append(((axis, call.operation, self.phase), call))


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
    """Bytes of states on an axis by collective: reduce-scatters and all-gathers; the rest is logging and the like.

    DeepSpeed's stages 1 and 2 reduce each rank's part to that rank: a reduce-scatter in several calls.
    """
    kinds = ("reduce_scatter", "reduce", "all_gather")
    return {kind: sum(m.nbytes for (a, c, _), m in moved.items() if (a, c) == (axis, kind)) for kind in kinds}
