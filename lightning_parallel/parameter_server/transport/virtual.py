"""All processes of a job in this one, on a clock that jumps from event to event, with faults on demand.

The one idea: a heap of (time, order, event). A message is an event at the time of its arrival, a state machine's
``wake_at`` is one, a crash is one. One seed gives one run, exactly. Left out: real time, threads, bytes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from lightning_parallel.parameter_server.messages import Message, View, Wake


class Machine(Protocol):
    """What the network moves messages between."""

    address: str
    view: View

    @property
    def wake_at(self) -> float | None: ...

    def handle(self, message: Message, now: float) -> list[Message]: ...

    def place(self, message: Message) -> Tensor | None:
        """Where the tensor of a message that is on its way, given without it, is wanted; None for anywhere."""


class VirtualNetwork:
    """A network and a clock.

    Args:
        delay: seconds that a message travels; called once a message.
        fate: how many times a message arrives: 1, 0 if it is lost, 2 if it is doubled. Called once a message.
        ordered: messages from one process to another arrive in the order in which they were sent.

    Example:
        >>> class Echo:
        ...     address, wake_at = "echo", None
        ...     def handle(self, message, now):
        ...         print(now, message.body)
        ...         return []
        >>> network = VirtualNetwork(delay=lambda message: 2.0)
        >>> network.add(Echo(), [])
        >>> network.send([Message("", "echo", 0, "hello")])
        >>> network.run()
        2.0 hello
    """

    def __init__(
        self,
        delay: Callable[[Message], float] = lambda message: 0.0,
        fate: Callable[[Message], int] = lambda message: 1,
        ordered: bool = True,
    ) -> None:
        self.delay, self.fate, self.ordered = delay, fate, ordered
        self.now = 0.0
        self.machines: dict[str, Machine] = {}
        self.cut: set[tuple[str, str]] = set()  # (source, target) between which nothing passes
        self.stopped: dict[str, list[Message]] = {}  # processes that are stopped, and what waits for them
        self.delivered = 0
        self._heap: list[tuple[float, int, Message | Callable[[], None]]] = []
        self._order = itertools.count()
        self._arrivals: dict[tuple[str, str], float] = {}
        self._wakes: dict[str, float] = {}

    def add(self, machine: Machine, first: Iterable[Message]) -> None:
        """Start a process, with what it says first."""
        self.machines[machine.address] = machine
        self._after(machine, list(first))

    def crash(self, address: str) -> None:
        """End a process at once; what is on its way to it is lost."""
        self.machines.pop(address, None)
        self.stopped.pop(address, None)

    def stop(self, address: str) -> None:
        """Stop a process as SIGSTOP does; what comes for it waits."""
        self.stopped.setdefault(address, [])

    def go_on(self, address: str) -> None:
        """Let a stopped process go on, with all that has come meanwhile."""
        self._wakes.pop(address, None)
        for message in [*self.stopped.pop(address, []), Message("", address, 0, Wake())]:
            self._deliver(message)

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), event))

    def send(self, messages: Iterable[Message]) -> None:
        """Put messages on their way."""
        for message in messages:
            for _ in range(self.fate(message)):
                arrival = self.now + self.delay(message)
                if self.ordered:
                    link = (message.source, message.target)
                    arrival = self._arrivals[link] = max(arrival, self._arrivals.get(link, 0.0))
                heapq.heappush(self._heap, (arrival, next(self._order), message))

    def run(self, until: Callable[[], bool] = lambda: False, limit: int = 1_000_000) -> None:
        """Go from event to event until none is left, or ``until`` says so.

        Raises:
            TimeoutError: more than ``limit`` events happened.
        """
        for _ in range(limit):
            if not self._heap or until():
                return
            self.now, _, event = heapq.heappop(self._heap)
            if isinstance(event, Message):
                self._deliver(event)
            else:
                event()
        raise TimeoutError(f"{limit} events have happened and the run is not at its end, at {self.now} s.")

    def _deliver(self, message: Message) -> None:
        if (message.source, message.target) in self.cut:
            return
        if message.target in self.stopped:
            self.stopped[message.target].append(message)
        elif (machine := self.machines.get(message.target)) is not None:
            self.delivered += 1
            self._after(machine, machine.handle(message, self.now))

    def _after(self, machine: Machine, messages: list[Message]) -> None:
        self.send(messages)
        due = machine.wake_at
        planned = self._wakes.get(machine.address)
        if due is not None and (planned is None or due < planned or planned <= self.now):
            self._wakes[machine.address] = due
            self.at(due, lambda: self._wake(machine, due))

    def _wake(self, machine: Machine, due: float) -> None:
        if self._wakes.get(machine.address) == due:
            del self._wakes[machine.address]
            self._deliver(Message("", machine.address, 0, Wake()))
