"""Two hosts on one machine: two network namespaces joined by a cable that can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

HOSTS = {"one": "10.213.7.1", "two": "10.213.7.2"}
CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Host:
    """A network namespace."""

    name: str
    namespace: str

    @property
    def address(self) -> str:
        return HOSTS[self.name]

    @property
    def interface(self) -> str:
        return f"lp-{self.name}"

    def cable(self, state: str) -> None:
        """Pull this host's end of the cable out (``down``), or put it back (``up``)."""
        ip("-n", self.namespace, "link", "set", self.interface, state)

    def processes(self) -> list[int]:
        """Of this host."""
        inside = subprocess.run(["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True)
        return [int(process) for process in inside.stdout.split()]

    def end(self) -> None:
        """End all processes of this host."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def enter(self) -> None:
        """Make this process one of the host's; only before it has opened sockets or started threads."""
        with open(f"/var/run/netns/{self.namespace}") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Two namespaces with a cable between them; skips where this process may not make any."""
    made = [Host(name, f"lp-{os.getpid()}-{name}") for name in HOSTS]
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip")
    try:
        for host in made:
            ip("netns", "add", host.namespace)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    try:
        first, second = made
        ends = ("lp-one", "type", "veth", "peer", "name", "lp-two", "netns", second.namespace)
        ip("-n", first.namespace, "link", "add", *ends)
        for host in made:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            ip("-n", host.namespace, "link", "set", host.interface, "up")
            ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
