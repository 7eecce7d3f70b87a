"""Point-to-point transfer between the ranks of a pipeline.

The one idea: a `Channel` is one direction between two stages. Its tensors travel as raw bytes in the order they were
sent (any dtype; a transposed or channels-last layout arrives as it was agreed), on a communicator of its own where the
device has streams, so that a send never waits behind a receive. Small objects (headers, once per input signature)
travel beside them over the host's group. Nothing here copies a tensor to the host.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.pipeline.transport.payload import empty, storage_order, to_bytes
from lightning_parallel.pipeline.transport.tensor_meta import TensorMeta


class LocalChannel:
    """What a `Channel` does, between two stages of one rank: nothing moves.

    A value is there before it is waited for, since the rank runs the stage that makes it first.
    """

    is_local = True

    def __init__(self) -> None:
        self._tensors: deque[list[Tensor]] = deque()
        self._objects: deque[Any] = deque()

    def send(self, tensors: Sequence[Tensor], metas: Sequence[TensorMeta] | None = None) -> None:
        self._tensors.append([tensor.detach() for tensor in tensors])

    def post(self, metas: Sequence[TensorMeta], what: str) -> LocalReceipt:
        return LocalReceipt(self._tensors)

    def send_object(self, value: Any) -> None:
        self._objects.append(value)

    def receive_object(self, what: str) -> Any:
        return self._objects.popleft()

    def settle(self) -> None:
        """A step begins: what an interrupted one left is forgotten."""
        self._tensors.clear()


@dataclass
class LocalReceipt:
    """Waits by taking the oldest tensors that were handed over."""

    handed: deque[list[Tensor]]

    def wait(self) -> list[Tensor]:
        return self.handed.popleft()


_BLOCK = 512  # bytes of an object's first message

Waiting = Callable[[str], AbstractContextManager[Any]]


def nobody_waits(what: str) -> AbstractContextManager[Any]:
    """The context of a receive that nobody watches."""
    return nullcontext()


@dataclass
class Receipt:
    """Receives that were posted early; `wait` gives the tensors."""

    tensors: list[Tensor]
    works: list[Any]
    what: str
    waiting: Waiting

    def wait(self) -> list[Tensor]:
        """The received tensors. On CUDA the current stream waits, not the host."""
        if self.works:
            with self.waiting(self.what):
                for work in self.works:
                    work.wait()
        return self.tensors


class Channel:
    """Transfers from one global rank to another.

    Args:
        source: global rank that sends.
        target: global rank that receives.
        tag: a number that no other channel between the two has; 2 * tag and 2 * tag + 1 are used.
        device: where received tensors live.
        host_group: a gloo group over (at least) both ranks.
        device_group: a group of the two ranks alone whose communicator carries tensors; None sends them over
            host_group.
        waiting: a context entered while this process is blocked in a receive.

    Attributes:
        observer: of all channels, who begins sends and receives of tensors in their place, to time them; or None.
    """

    is_local = False
    observer: ClassVar[Callable[[Channel, str, Tensor, Callable[[Tensor], Any]], Any] | None] = None

    def __init__(
        self,
        source: int,
        target: int,
        tag: int,
        device: torch.device,
        host_group: Any = None,
        device_group: Any = None,
        waiting: Waiting = nobody_waits,
    ) -> None:
        self.source, self.target, self.tag, self.device, self.waiting = source, target, tag, device, waiting
        self._object_tag, self._tensor_tag = 2 * tag, 2 * tag + 1
        self._host_group, self._device_group = host_group, device_group
        self._sending: deque[tuple[Any, Tensor]] = deque()
        self._sent_before: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensors: Sequence[Tensor], metas: Sequence[TensorMeta] | None = None) -> None:
        """Start sending; returns at once. The bytes are kept until they have left.

        ``metas`` are those that the other end receives with: they say in which order the bytes lie. Without them the
        tensors are received contiguous.
        """
        self._forget_sent()
        orders = [None] * len(tensors) if metas is None else map(storage_order, metas)
        for tensor, order in zip(tensors, orders, strict=True):
            payload = to_bytes(tensor, order)
            if payload.numel():
                self._sending.append((self._isend(payload), payload))

    def post(self, metas: Sequence[TensorMeta], what: str) -> Receipt:
        """Start receiving tensors of the given metas; `what` says in an error which value is waited for."""
        tensors = [empty(meta, self.device) for meta in metas]
        works = [
            self._irecv(to_bytes(tensor, storage_order(meta)))
            for tensor, meta in zip(tensors, metas, strict=True)
            if tensor.numel()
        ]
        return Receipt(tensors, works, what, self.waiting)

    def send_object(self, value: Any) -> None:
        """Send a small picklable object over the host's group: one message if it fits, a second one for the rest."""
        self._forget_sent()
        payload = pickle.dumps(value)
        block = bytearray(len(payload).to_bytes(8, "little") + payload).ljust(_BLOCK, b"\0")
        for part in (block[:_BLOCK], block[_BLOCK:]):
            if part:
                tensor = torch.frombuffer(part, dtype=torch.uint8)
                work = dist.isend(tensor, self.target, group=self._host_group, tag=self._object_tag)
                self._sending.append((work, tensor))

    def receive_object(self, what: str) -> Any:
        """Wait for an object."""
        with self.waiting(what):
            block = self._receive_bytes(_BLOCK)
            size = 8 + int.from_bytes(block[:8], "little")
            if size > _BLOCK:
                block += self._receive_bytes(size - _BLOCK)
        return pickle.loads(block[8:size])

    def _receive_bytes(self, size: int) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        dist.recv(buffer, self.source, group=self._host_group, tag=self._object_tag)
        return buffer.numpy().tobytes()

    def settle(self) -> None:
        """Once a step: let go of what was sent before the last call, waiting for it if it has not been taken yet.

        gloo says of a send that it is over only to those who wait for it, so somebody has to, sooner or later.
        """
        self._wait_for(self._sent_before)
        self._sent_before, self._sending = self._sending, deque()

    def flush(self) -> None:
        """Wait until everything sent has left (on CUDA: let the current stream wait)."""
        self._wait_for(self._sent_before)
        self._wait_for(self._sending)

    def _wait_for(self, sent: deque[tuple[Any, Tensor]]) -> None:
        while sent:
            with self.waiting(f"rank {self.target} to take what was sent"):
                sent[0][0].wait()
            sent.popleft()

    def _forget_sent(self) -> None:
        """Let go of what has left, oldest first."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def warm_up(self, rank: int) -> None:
        """Open the connection with one byte; both ends call it, channels in one order on all ranks."""
        if rank == self.source:
            self.send([torch.zeros(1, device=self.device)])
            self.flush()
        elif rank == self.target:
            self.post([TensorMeta((1,), (1,), torch.float32)], "the first byte").wait()

    def _isend(self, payload: Tensor) -> Any:
        observer = Channel.observer
        return self._send(payload) if observer is None else observer(self, "send", payload, self._send)

    def _irecv(self, buffer: Tensor) -> Any:
        observer = Channel.observer
        return self._receive(buffer) if observer is None else observer(self, "recv", buffer, self._receive)

    def _send(self, payload: Tensor) -> Any:
        if self._device_group is not None:
            return self._device_group.send([payload], self._place_of(self.target), 0)
        return dist.isend(payload, self.target, group=self._host_group, tag=self._tensor_tag)

    def _receive(self, buffer: Tensor) -> Any:
        if self._device_group is not None:
            return self._device_group.recv([buffer], self._place_of(self.source), 0)
        return dist.irecv(buffer, self.source, group=self._host_group, tag=self._tensor_tag)

    def _place_of(self, rank: int) -> int:
        """A rank's place in the group of the two."""
        return int(rank == max(self.source, self.target))


AnyChannel = Channel | LocalChannel
AnyReceipt = Receipt | LocalReceipt
