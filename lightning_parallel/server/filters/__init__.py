"""What a worker does to a vector before it is sent."""

from __future__ import annotations

from torch import Tensor

from lightning_parallel.server.messages import Coded, Values


def decode(values: Values) -> Tensor:
    """The vector that was sent."""
    assert not isinstance(values, Coded)
    return values
