"""A channel between two stages of one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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
