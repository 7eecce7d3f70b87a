"""One range as the result of its history: weights, optimizer state, clocks and counters that change by entries alone.

The one idea: ``apply`` is the only way to change a range, so that replicas which applied the same entries are equal, a
replayed log gives the same range, and history is linear. Left out: where entries come from (``head.py``), who else
has them (``chain.py``), who reads (``tail.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.parameter_server.clock import VectorClock
from lightning_parallel.parameter_server.filters import decode
from lightning_parallel.parameter_server.filters.codec import fits
from lightning_parallel.parameter_server.messages import Copy, Entry, Seqs, Values
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.sandblaster.lbfgs import check, perform
from lightning_parallel.parameter_server.updates import Update

Memory = Callable[[int], Tensor]  # gives so many zeros, float32

COUNTERS = ("lsn", "version", "steps", "dropped", "view", "batch")


class Range:
    """A range's state after ``lsn`` entries.

    Args:
        key: number of the range.
        length: elements.
        update: what a push does.
        memory: where the weights lie.

    Example:
        >>> from lightning_parallel.parameter_server.updates import AddDelta
        >>> part = Range(0, 2, AddDelta())
        >>> part.apply(Entry(1, seed=torch.zeros(2), joined=(5,)))
        >>> part.apply(Entry(2, push=torch.ones(2), marks={5: (1, 1)}, pushes=1))
        >>> part.weights.tolist(), part.version, part.seqs, part.clocks.minimum
        ([1.0, 1.0], 1, {5: 1}, 1)
    """

    def __init__(self, key: int, length: int, update: Update, memory: Memory = torch.zeros) -> None:
        self.key, self.length, self.update, self.memory = key, length, update, memory
        self.weights, self.state = memory(length), update.state(length)
        self.clocks, self.seqs = VectorClock(), dict[int, int]()
        self.left: tuple[int, ...] = ()  # workers that are gone; `seqs` keeps how far they came
        self.lsn = self.version = self.steps = self.dropped = self.view = self.batch = 0
        self.seeded = False
        self._loan: weakref.ref[Tensor] | None = None
        self.vectors: dict[str, Tensor] = {}
        self.calls: dict[str, tuple[int, float]] = {}  # caller -> its last call and what that came to
        self.counted = set[int]()  # portions of the batch in hand whose results are in

    def apply(self, entry: Entry) -> None:
        """Take the next step of the history, which `admits` it."""
        assert entry.lsn == self.lsn + 1, (entry.lsn, self.lsn)
        self.lsn = entry.lsn
        if entry.push is not None or entry.seed is not None or entry.call is not None:
            self._keep_loan()
        if entry.seed is not None:
            self.weights.copy_(entry.seed)
            self.seeded = True
        if entry.call is not None:
            caller, request, batch, portion, *words = entry.call
            self._call(caller, request, batch, portion, tuple(words), entry.push)
        elif entry.push is not None:
            self.steps += 1
            self.update.apply(self.weights, self.state, decode(entry.push), self.steps, entry.lr)
        self.version += entry.pushes
        self.dropped += entry.dropped
        self.view = entry.view or self.view
        self._count(entry)

    def _call(
        self, caller: str, request: int, batch: int, portion: int, words: tuple[str | float, ...], values: Values | None
    ) -> None:
        if "x" not in self.vectors:
            self.vectors["x"] = self.weights.to(torch.float64)
        vector = None if values is None else decode(values)
        value = perform(self.vectors, words, vector)
        if words[0] == "store":
            self.weights.copy_(self.vectors["x"])
        if portion >= 0:
            self.counted.add(portion)
            return
        self.calls[caller] = (request, value)
        if batch > self.batch:
            self.batch, self.counted = batch, set()

    def _count(self, entry: Entry) -> None:
        for worker in entry.joined:
            self.clocks.join(worker)
            self.seqs[worker] = 0
        for worker, (seq, clock) in entry.marks.items():
            self.seqs[worker] = seq
            self.clocks.advance(worker, clock)
        for worker in entry.left:
            self.clocks.leave(worker)
            self.left = (*self.left, worker)

    def admits(self, entry: Entry) -> bool:
        """Whether an entry can be applied: of vectors of this length, and of workers that are there."""
        for worker in entry.marks:
            if worker not in self.clocks and worker not in entry.joined:
                return False
        if not fits(entry.seed, self.length):
            return False
        return fits(entry.push, self.length) if entry.call is None else self._can_do(entry.call, entry.push)

    def _can_do(self, call: tuple[Any, ...], push: Values | None) -> bool:
        match call:
            case (str(), int(), int(), int(), *words):
                with suppress(ValueError, RuntimeError, IndexError):
                    if isinstance(push, (Tensor, type(None))) or push.length == self.length:
                        check({"x": self.weights} | self.vectors, tuple(words), None if push is None else decode(push))
                        return True
        return False

    def lend(self) -> Tensor:
        """The weights as they are now, to be read only. They stay so for as long as the returned tensor object is
        there (a view of it does not count): what changes them meanwhile works on a copy."""
        loan = None if self._loan is None else self._loan()
        if loan is None:
            loan = self.weights.view(-1)
            self._loan = weakref.ref(loan)
        return loan

    def _keep_loan(self) -> None:
        """The weights are about to change: leave those to their readers that are still lent."""
        if self._loan is not None and self._loan() is not None:
            self.weights = self.memory(self.length).copy_(self.weights)
        self._loan = None

    def others(self, worker: int) -> int:
        """Pushes of everyone but a worker that the weights hold."""
        return self.version - self.seqs.get(worker, 0)

    def covers(self, target: Seqs) -> bool:
        """Whether every push of a version is in, of those workers that are still there."""
        return all(self.seqs.get(worker, 0) >= seq or worker in self.left for worker, seq in target.items())

    def copy(self) -> Copy:
        """Everything, as a message that shares no memory with the range."""
        numbers = {name: getattr(self, name) for name in COUNTERS}
        numbers |= {"seeded": int(self.seeded), "floor": self.clocks.floor}
        tensors = {"weights": self.weights.clone(), **{f"state.{k}": v.clone() for k, v in self.state.items()}}
        tensors |= {f"vector.{name}": vector.clone() for name, vector in self.vectors.items()}
        calls, counted = dict(self.calls), tuple(sorted(self.counted))
        return Copy(self.key, numbers, tensors, dict(self.seqs), self.clocks.copy(), self.left, calls, counted)

    @classmethod
    def of(cls, copy: Copy, update: Update, memory: Memory = torch.zeros) -> Range:
        """The range that a copy was made of."""
        tensors = dict(copy.tensors)
        part = cls(copy.key, tensors["weights"].numel(), update, memory)
        part.weights.copy_(tensors["weights"])
        part.state = {slot: tensors[f"state.{slot}"].clone() for slot in update.names()}
        part.vectors = {k.removeprefix("vector."): v.clone() for k, v in tensors.items() if k.startswith("vector.")}
        for name in COUNTERS:
            setattr(part, name, copy.numbers[name])
        part.seeded = bool(copy.numbers["seeded"])
        part.clocks, part.seqs = VectorClock(copy.clocks, copy.numbers["floor"]), dict(copy.seqs)
        part.left, part.calls, part.counted = copy.left, dict(copy.calls), set(copy.counted)
        return part


def is_copy(copy: Copy, rules: Rules) -> bool:
    """Whether a range can be made of a copy: it has all that one of its key and length has, and nothing of another."""
    if not 0 <= copy.key < rules.layout.num_ranges:
        return False
    length, tensors = rules.layout.length(copy.key), copy.tensors
    numbers = all(copy.numbers.get(name, -1) >= 0 for name in (*COUNTERS, "seeded", "floor"))
    state = {f"state.{slot}": vector for slot, vector in rules.update.state(length).items()}
    wanted = {"weights": torch.empty(length, device="meta"), **state}
    same = all(
        name in tensors and (tensors[name].dtype, tensors[name].numel()) == (like.dtype, like.numel())
        for name, like in wanted.items()
    )
    others = [vector for name, vector in tensors.items() if name not in wanted]
    whole = all((vector.dtype, vector.numel()) == (torch.float64, length) for vector in others)
    return numbers and same and whole and copy.clocks.keys() <= copy.seqs.keys()
