"""What the process of a training run's server does: it serves, and answers questions while nothing is pushed.

The one idea: a thread beside the server reads its ranges, which is how optimizer states come into a checkpoint. It also
notes in which order pushes came in, so that the age of each is known afterwards. Left out: who asks (``hosting.py``).
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from lightning_parallel.parameter_server.job import Job
from lightning_parallel.parameter_server.messages import Entry
from lightning_parallel.parameter_server.server.history import Range
from lightning_parallel.parameter_server.server.server import Server
from lightning_parallel.parameter_server.transport.memory import keep_freed_memory
from lightning_parallel.parameter_server.transport.sealed import AnyConnection

_KEPT = 1 << 18  # pushes whose order is remembered
Came = tuple[int, int, int, int]  # worker, its push, whether that held anything, whether it was dropped
Seen = tuple[int, dict[int, int], tuple[int, ...]]  # entries of a range, pushes of each worker, workers that are gone


class Notes:
    """What a server remembers of the order in which pushes came into the first range."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, list[Came]]] = deque(maxlen=_KEPT)

    def take(self, key: int, entry: Entry) -> None:
        """Note an entry; a server's journal."""
        if key == 0 and entry.pushes:
            filled, dropped = int(entry.push is not None), int(entry.dropped > 0)
            came = [(w, seq, filled or dropped, dropped) for w, (seq, _) in sorted(entry.marks.items())]
            self._entries.append((entry.lsn, came))

    def since(self, lsn: int) -> dict[int, list[Came]]:
        """The entries after one."""
        with_newest_first = itertools.takewhile(lambda entry: entry[0] > lsn, reversed(self._entries))
        return dict(reversed(list(with_newest_first)))


def serve(job: Job, address: str, ranges: Sequence[Range], line: AnyConnection, host: str = "") -> None:
    """Be a server until the manager says that this one is gone, or the line ends.

    Args:
        job: of the run, as this host reaches it.
        address: of the server.
        ranges: that it begins with.
        line: on which it is asked.
        host: name of this host.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    notes = Notes()
    mine = {part.key: part for part in ranges}
    server = Server(address, job.rules, job.token, ranges=mine, journal=notes.take, board=job.board(address), host=host)
    node = job.node(server)
    threading.Thread(target=_answer, args=(server, notes, line), name="answers", daemon=True).start()
    node.send(server.start(node.now()))
    node.run(until=lambda: server.lost)
    node.close()
    server.board.close()


def _answer(server: Server, notes: Notes, line: AnyConnection) -> None:
    """Answer questions until the line is closed, and the run over with it."""
    with suppress(EOFError, OSError):
        while True:
            question = pickle.loads(line.recv_bytes())
            line.send_bytes(pickle.dumps(_answer_to(question, server, notes)))
    os._exit(0)


def _answer_to(question: tuple, server: Server, notes: Notes) -> Mapping[int, Any]:
    if question[0] == "copies":
        return {key: replica.part.copy() for key, replica in list(server.replicas.items())}
    if question[0] == "seen":
        parts = [replica.part for replica in list(server.replicas.values())]
        return {part.key: (part.lsn, dict(part.seqs), part.left) for part in parts}
    return notes.since(question[1])
