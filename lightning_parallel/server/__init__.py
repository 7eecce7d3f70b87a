"""A parameter server: sharded, bounded-stale, filtered, replicated.

Everything that decides is a pure state machine, ``handle(message, now) -> messages``: ``Manager``, ``Server``,
``Client``. Transports carry their messages. ``docs/parameter_server.md`` draws the protocol and says what is
guaranteed.
"""

from lightning_parallel.server.client import Client
from lightning_parallel.server.consistency import (
    BSP,
    ESSP,
    SSP,
    Asynchronous,
    BoundedDelay,
    Consistency,
    DropOlderThan,
    Sandblaster,
    staleness_bound,
)
from lightning_parallel.server.layout import Layout, flatten, unflatten
from lightning_parallel.server.manager import Manager, RangeLostError
from lightning_parallel.server.node import Server
from lightning_parallel.server.reading import Result
from lightning_parallel.server.rules import Rules
from lightning_parallel.server.updates import SGD, Adagrad, Adam, AdamW, AddDelta, Update

__all__ = [
    "BSP",
    "ESSP",
    "SGD",
    "SSP",
    "Adagrad",
    "Adam",
    "AdamW",
    "AddDelta",
    "Asynchronous",
    "BoundedDelay",
    "Client",
    "Consistency",
    "DropOlderThan",
    "Layout",
    "Manager",
    "RangeLostError",
    "Result",
    "Rules",
    "Sandblaster",
    "Server",
    "Update",
    "flatten",
    "staleness_bound",
    "unflatten",
]
