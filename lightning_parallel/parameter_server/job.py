"""What every process of a job is given, and what each becomes of it: a worker, a server, the manager, a helper.

The one idea: a ``Job`` is a few plain values (a secret number, a token, a folder, the manager's endpoint), so that a
process of another host takes part with the same values and its own address. Left out: starting processes
(``launcher.py``), Trainers.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_parallel.parameter_server.filters import Filters, Float32
from lightning_parallel.parameter_server.manager.manager import Manager
from lightning_parallel.parameter_server.manager.roster import RosterLog
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.sandblaster.caller import Caller
from lightning_parallel.parameter_server.sandblaster.helper import Helper
from lightning_parallel.parameter_server.server.chain import MANAGER
from lightning_parallel.parameter_server.server.server import Server
from lightning_parallel.parameter_server.server.storage import Storage
from lightning_parallel.parameter_server.transport.board import Board, Boards, has_boards
from lightning_parallel.parameter_server.transport.errands import Coordination, Helping
from lightning_parallel.parameter_server.transport.keys import CurveKeys
from lightning_parallel.parameter_server.transport.link import QUEUE
from lightning_parallel.parameter_server.transport.session import WorkerSession
from lightning_parallel.parameter_server.transport.shared_files import say_no_room
from lightning_parallel.parameter_server.transport.slab import Slab
from lightning_parallel.parameter_server.transport.zeromq import Node, endpoint_in
from lightning_parallel.parameter_server.worker.client import Client


@dataclass(frozen=True)
class Job:
    """What every process of a job is given.

    Args:
        rules: the job's agreement.
        num_servers: servers that the first view waits for.
        num_workers: workers that the first view waits for.
        folder: of the job on this host, mode 0700.
        number: secret, 64 bits.
        token: what a ``Hello`` must carry.
        host: ``""`` for ipc, else the address that sockets listen on.
        manager: where the manager listens.
        slab_bytes: shared memory of each process; 0 for none.
        keys: made where ``host`` is reached from other hosts.
        shared: folder of slabs and boards, mode 0700; that of the job if it is not given.
    """

    rules: Rules
    num_servers: int
    num_workers: int
    folder: Path
    number: int
    token: str
    host: str = ""
    manager: str = ""
    slab_bytes: int = 0
    keys: CurveKeys | None = None
    shared: Path | None = None

    def node(self, machine: Manager | Server | Client | Caller, endpoint: str = "", slab: Slab | None = None) -> Node:
        """Sockets for a state machine of the job."""
        most = 64 * self.rules.layout.size + (1 << 20)
        endpoint = endpoint or self.endpoint(machine.address)
        book = {MANAGER: self.manager} if machine.address != MANAGER else {}
        shared, borrows = self.shared or self.folder, isinstance(machine, Server)
        queue = max(QUEUE, self.rules.most_under_way * self.num_workers)
        node = Node(machine, self.number, endpoint, book, most, slab, shared, self.keys, borrows=borrows, queue=queue)
        if not isinstance(machine, Manager):
            machine.endpoint = node.endpoint
        return node

    def endpoint(self, address: str) -> str:
        """Where a process listens."""
        return f"tcp://{self.host}:*" if self.host else endpoint_in(self.folder, address)

    def slab(self, address: str) -> Slab | None:
        """Shared memory for a process, if the job has any."""
        return Slab(self.shared or self.folder, address, self.slab_bytes) if self.slab_bytes else None

    @property
    def has_boards(self) -> bool:
        """Whether tails show what they have to readers of this host: plain weights, read when readers want them."""
        plain = isinstance(self.rules.pull_precision, Float32) and not self.rules.consistency.eager
        return not self.host and plain and has_boards()

    def board(self, address: str) -> Board | None:
        """Where a server shows its ranges, if the job has such."""
        if not self.has_boards:
            return None
        try:
            return Board(self.shared or self.folder, address, self.rules.layout)
        except OSError as error:
            say_no_room(error)
            return None

    def join(self, name: str, filters: Filters | None = None, timeout: float = 120.0) -> WorkerSession:
        """A worker's session; call ``start`` on it."""
        client = Client(f"{name}.{secrets.token_hex(4)}", name, self.rules, self.token, filters=filters)
        if self.has_boards:
            client.look = Boards(self.shared or self.folder, self.rules.layout, self.rules.lease).look
        return WorkerSession(self.node(client, slab=self.slab(client.address)), timeout)

    def coordinate(self, name: str = "coordinator", timeout: float = 120.0) -> Coordination:
        """A coordinator's end of the job; call ``start`` on it."""
        return Coordination(self.node(Caller(f"{name}.{secrets.token_hex(4)}", self.rules, self.token)), timeout)

    def help(self, name: str, timeout: float = 120.0) -> Helping:
        """A helper's end of the job; call ``start`` on it."""
        return Helping(self.node(Helper(f"{name}.{secrets.token_hex(4)}", self.rules, self.token)), timeout)

    def serve(self, name: str, log: Path | None = None) -> None:
        """Be a server until the manager says that this one is gone.

        Args:
            name: of the server.
            log: folder in which its ranges are kept, so that a restart of all resumes.
        """
        address = f"{name}.{secrets.token_hex(4)}"
        slab = self.slab(address)
        memory = torch.zeros if slab is None else slab.zeros
        storage = None if log is None else Storage(log / name, self.rules, memory=memory)
        server = Server(
            address,
            self.rules,
            self.token,
            ranges={} if storage is None else storage.read(),
            journal=None if storage is None else storage.append,
            memory=memory,
            board=self.board(address),
        )
        node = self.node(server, slab=slab)
        if storage is not None:
            storage.watch(server)
        node.send(server.start(node.now()))
        node.run(until=lambda: server.lost)
        node.close()
        server.board.close()

    def serve_in_thread(self, name: str) -> threading.Thread:
        """Be a server in a thread of this process: a shard that lives with a worker."""
        thread = threading.Thread(target=self.serve, args=(name,), name=f"server {name}", daemon=True)
        thread.start()
        return thread

    def manage(self) -> None:
        """Be the manager until the process ends; started again, it goes on where the last one was."""
        log = RosterLog(self.folder / "manager.log")
        manager = Manager(self.rules, self.num_servers, self.num_workers, self.token, log.read(), log.append)
        node = self.node(manager, self.manager)
        node.send(manager.start(node.now()))
        node.run(until=lambda: False)
