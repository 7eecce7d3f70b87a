"""pyzmq, or in its place what says that it is missing once it is used.

The one idea: only processes that talk need pyzmq, so the package and all its other strategies are imported without it.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = ["NOBLOCK", "RCVMORE", "SNDMORE", "refuse_missing", "zmq"]

NOBLOCK, SNDMORE, RCVMORE = 1, 2, 13  # as in zmq.h; pyzmq's own are slow to calculate with
_ADVICE = "pyzmq is not installed, over which parameter servers talk: pip install pyzmq"


def refuse_missing() -> None:
    """Raise if pyzmq is not there.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if isinstance(zmq, _Missing):
        raise ModuleNotFoundError(_ADVICE)


class _Missing:
    def __getattr__(self, name: str) -> NoReturn:
        raise ModuleNotFoundError(_ADVICE)


try:
    import zmq
except ModuleNotFoundError:
    zmq = _Missing()  # type: ignore[assignment]
