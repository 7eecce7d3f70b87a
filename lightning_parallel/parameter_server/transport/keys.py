"""Who may listen and talk: CURVE keys of a job, and which addresses go without."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_parallel.parameter_server.transport.pyzmq import zmq


@dataclass(frozen=True)
class CurveKeys:
    """CURVE keys of a job, made per run; whoever has them belongs to it."""

    public: bytes
    secret: bytes

    @classmethod
    def make(cls) -> CurveKeys:
        """New keys."""
        return cls(*zmq.curve_keypair())

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Take only peers that know the public key."""
        socket.curve_server, socket.curve_secretkey, socket.curve_publickey = True, self.secret, self.public

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Talk to a listener of the job."""
        socket.curve_serverkey, socket.curve_secretkey, socket.curve_publickey = self.public, self.secret, self.public


def is_local(endpoint: str) -> bool:
    """Whether only this host reaches an endpoint."""
    return endpoint.startswith(("ipc://", "inproc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]"))
