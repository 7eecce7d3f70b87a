"""Servers of a run on other hosts than rank 0's.

The one idea: server i of a run on n hosts is on host i mod n. The first worker of each other host forks its servers
before anybody knows what they will hold; each has a line to the hub, on which it is told, and ends when that does: so
no run leaves any behind, on a host whose cable is out neither. A server outlives the workers of its host.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from lightning_parallel.parameter_server.serving import serve
from lightning_parallel.parameter_server.trainer.coordination.detached_processes import detach
from lightning_parallel.parameter_server.trainer.coordination.hello import SERVER, Introduction
from lightning_parallel.parameter_server.trainer.coordination.hosts import Hosts


@dataclass(frozen=True)
class Placement:
    """Which servers of a run are on which host.

    Args:
        num_servers: of the run.
        num_hosts: that they are spread over; the first is rank 0's.

    Example:
        >>> Placement(5, 2).on(1), Placement(5, 2).far, Placement(1, 2).far
        ((1, 3), (1, 3), ())
    """

    num_servers: int
    num_hosts: int

    def on(self, host: int) -> tuple[int, ...]:
        """Servers of a host."""
        return tuple(server for server in range(self.num_servers) if server % self.num_hosts == host)

    @property
    def far(self) -> tuple[int, ...]:
        """Servers that are not on rank 0's host."""
        return tuple(server for server in range(self.num_servers) if server % self.num_hosts)


def start_servers(hosts: Hosts, host: int, servers: Sequence[int]) -> None:
    """Fork the servers of a host; this worker's line to the hub is there already."""
    port = hosts.port
    for server in servers:
        detach(_wait_to_serve, hosts, port, host, server)


def _wait_to_serve(hosts: Hosts, port: int, host: int, server: int) -> None:
    """What the process of a server runs."""
    os.setsid()  # torchrun ends all that is in a worker's session, when another worker has failed
    line = hosts.connect(port, Introduction(SERVER, server, str(host)))
    with suppress(EOFError, OSError):  # the run ends without having needed any
        job, address, ranges = pickle.loads(line.recv_bytes())
        serve(hosts.place(job, line), address, ranges, line, str(host))
