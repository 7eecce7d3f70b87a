"""TCP ports that stay free from the moment they are chosen until somebody listens on them.

The one idea: a socket that is bound with SO_REUSEADDR and does not listen keeps a port from every process that asks the
system for any port, for a listener or for a connection, and does not stop a listener which asks for this one. Left out:
systems other than Linux, where the socket is closed at once and the port is as free as it was when it was found.
"""

from __future__ import annotations

import socket
import sys


class ReservedPort:
    """A port that the system gives to nobody else until this is closed; forked processes may listen on it.

    Args:
        address: of this host, whose port it is; "" for all of them.

    Example:
        >>> reserved = ReservedPort("127.0.0.1")
        >>> 1024 <= reserved.number < 65536
        True
        >>> reserved.close()
    """

    def __init__(self, address: str = "") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Give the port back; whoever listens on it stays."""
        self._socket.close()
