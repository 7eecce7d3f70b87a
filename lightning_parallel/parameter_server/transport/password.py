"""What whoever connects to a TCP socket without keys has to know: the job's secret number.

The one idea: ZeroMQ keeps a message of many parts until its last one has come, so who may send any is asked before the
first; on loopback, where nobody listens in, a password does, and what is sent after it costs no more than without.
Left out: other hosts, which need ``keys.py``, and ipc, which the file system keeps.

Source:
    ZeroMQ RFC 24 (ZMTP-PLAIN) and RFC 27 (ZAP, by which a process is asked about who connects).
"""

from __future__ import annotations

import hmac
import threading
from contextlib import suppress

from lightning_parallel.parameter_server.transport.pyzmq import zmq

_ASKED_AT, _DOMAIN, _NAME = "inproc://zeromq.zap.01", b"lightning_parallel", b"job"


class Password:
    """A job's password.

    Args:
        context: of the sockets.
        job: secret number of the job.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], job: int) -> None:
        self._context, self._word = context, f"{job:016x}".encode()

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Take only peers that know it; asked in a thread, which ends with the context."""
        asked = self._context.socket(zmq.REP)
        asked.linger = 0
        asked.bind(_ASKED_AT)
        threading.Thread(target=self._answer, args=(asked,), name="password", daemon=True).start()
        socket.plain_server, socket.zap_domain = True, _DOMAIN

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Talk to a listener of the job."""
        socket.plain_username, socket.plain_password = _NAME, self._word

    def _answer(self, asked: zmq.Socket[bytes]) -> None:
        with asked, suppress(zmq.ContextTerminated):
            while True:
                version, request, *_, mechanism, name, word = asked.recv_multipart()
                knows = (mechanism, name) == (b"PLAIN", _NAME) and hmac.compare_digest(word, self._word)
                status = [b"200", b"OK"] if knows else [b"400", b"not of this job"]
                asked.send_multipart([version, request, *status, b"", b""])
