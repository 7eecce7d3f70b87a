"""Failures of a worker that do not end the run: the others go on without it, as if it had been killed.

The one idea: what took the worker out of the run was not its own code. Left out: workers whose process ended.
"""

from __future__ import annotations

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_parallel.errors import Failure
from lightning_parallel.parameter_server.transport.session import LeaseLostError
from lightning_parallel.parameter_server.worker.island import IslandLostError


def why_tolerated(failure: bytes, lease: str = "") -> str:
    """Why the others go on without a worker that says it failed; empty if they do not.

    Args:
        failure: the bytes of a ``Failure``.
        lease: how long a worker may be silent, in words.
    """
    error = Failure.from_bytes(failure).error
    errors = (error, getattr(error, "__cause__", None))
    if any(isinstance(one, LeaseLostError) for one in errors):
        return f"it was silent for longer than its lease{lease}"
    if any(isinstance(one, SIGTERMException) for one in errors):
        return "it was told to end, by SIGTERM"
    return "its island has lost a member" if any(isinstance(one, IslandLostError) for one in errors) else ""
