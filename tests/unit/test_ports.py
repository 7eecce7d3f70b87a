"""A reserved port is nobody else's, and free for whoever was meant."""

import errno
import shutil
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist
import zmq
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_parallel.ports import ReservedPort
from lightning_parallel.trainer.launch.main_port import main_port


@pytest.fixture
def reserved():
    port = ReservedPort("127.0.0.1")
    yield port
    port.close()


def test_nobody_else_takes_it(reserved: ReservedPort):
    with socket.socket() as other, pytest.raises(OSError) as caught:
        other.bind(("127.0.0.1", reserved.number))
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("connecting", [False, True], ids=["listeners", "connections"])
def test_the_system_gives_it_to_nobody(connecting: bool):
    """In a network of its own with two ports to give, one of them reserved, all get the other."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("util-linux (unshare) or iproute2 (ip) is not installed")
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    script = [sys.executable, "-W", "ignore", "-c", _TWO_PORTS, str(int(connecting))]
    done = subprocess.run([*alone, *script], capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "Permission denied" in done.stderr or "Read-only" in done.stderr:
        pytest.skip(f"no network of its own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


_TWO_PORTS = """
import errno, socket, subprocess, sys
from lightning_parallel.ports import ReservedPort
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as ports:
    ports.write("40000 40001")
listener = socket.create_server(("127.0.0.1", 5000))
reserved = ReservedPort("127.0.0.1")
for _ in range(20):
    with socket.socket() as other:
        if int(sys.argv[1]):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
            other.connect(("127.0.0.1", 5000))
            listener.accept()[0].close()
        else:
            other.bind(("127.0.0.1", 0))
        assert other.getsockname()[1] != reserved.number
"""


def test_a_store_listens_there(reserved: ReservedPort):
    store = dist.TCPStore("127.0.0.1", reserved.number, 1, True)
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", reserved.number, 1, False).get("key") == b"value"


def test_a_manager_listens_there(reserved: ReservedPort):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        listener.bind(f"tcp://127.0.0.1:{reserved.number}")


def test_a_port_that_was_named_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_PORT", "12345")
    assert main_port(LightningEnvironment()) == (12345, None)
    assert main_port(TorchElasticEnvironment()) == (12345, None)
    monkeypatch.delenv("MASTER_PORT")
    port, reservation = main_port(LightningEnvironment())
    assert reservation is not None
    assert port == reservation.number
    reservation.close()
