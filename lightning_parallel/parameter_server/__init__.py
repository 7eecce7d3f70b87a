"""A parameter server: sharded, bounded-stale, filtered, replicated.

Everything that decides is a pure state machine, ``handle(message, now) -> messages``: ``Manager``, ``Server``,
``Client``. Transports carry their messages. ``docs/parameter_server.md`` draws the protocol and says what is
guaranteed.
"""

from lightning_parallel.parameter_server.consistency import (
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
from lightning_parallel.parameter_server.layout import Layout, flatten, unflatten
from lightning_parallel.parameter_server.manager.manager import Manager, RangeLostError
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.server import Server
from lightning_parallel.parameter_server.updates import SGD, Adagrad, Adam, AdamW, AddDelta, Update
from lightning_parallel.parameter_server.worker.client import Client
from lightning_parallel.parameter_server.worker.reading import Result

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
