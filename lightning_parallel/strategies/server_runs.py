"""Which run of its script a worker with servers comes to where others start workers, and that run's hub.

The one idea: every call of the Trainer is a run with a hub of its own, which rank 0 starts. A worker that others
started again may come to one that is over. Left out: what a run is (``server_life.py``).
"""

from __future__ import annotations

from lightning_parallel.parameter_server.trainer.coordination.external_coordinator import ExternalCoordinator, RunIsOver
from lightning_parallel.parameter_server.trainer.coordination.hosts import Hosts
from lightning_parallel.parameter_server.trainer.coordination.later_runs import LaterRuns
from lightning_parallel.parameter_server.trainer.coordination.remote_servers import Placement, start_servers
from lightning_parallel.parameter_server.trainer.server_plan import Wishes
from lightning_parallel.strategies.meeting import MeetingStrategy

_LATER_S = 120.0  # how long a worker that comes late waits for the next run
_runs: dict[int, int] = {}  # port -> runs of this process so far; every rank makes the same ones
_past: dict[int, dict[int, bytes]] = {}  # port -> what became of them, on rank 0
_newest: dict[int, ExternalCoordinator] = {}  # port -> the hub of the last of them, which may be another Trainer's


class ServerRuns(MeetingStrategy):
    """A strategy whose workers find the hub of a run."""

    wishes: Wishes
    restarts: int
    island_size: int
    server_nodes: int | None
    _port: int | None = None  # of the script, where others start workers
    _found: ExternalCoordinator | None = None  # of the run that begins
    _hosts: Hosts | None = None

    @property
    def num_islands(self) -> int:
        """Workers that the servers see."""
        return self.world_size // self.island_size

    @property
    def placement(self) -> Placement:
        """Which server is on which host."""
        return Placement(self.wishes.num_servers, min(self.server_nodes or self.num_nodes, self.num_nodes))

    def find_run(self) -> bytes | None:
        """Come to the script's next run; what became of it, if it is over.

        Raises:
            TimeoutError: there is none in time, nor a later one.
            StageError: it takes no more workers in, or nothing was kept of it.
        """
        environment, rank, world = self.cluster_environment, self.global_rank, self.world_size
        assert environment is not None
        port = self._port = environment.main_port
        self._close_hub()
        run = _runs[port] = _runs.get(port, 0) + 1
        if self.num_nodes > 1:
            self._hosts = Hosts.meet(environment.main_address, port, rank, world, self.timeout)
        try:
            self._found = self._hub_of(port, run)
        except RunIsOver:
            if not self.restarts:
                raise
            return LaterRuns(port, run, self._hosts).await_past(_LATER_S)
        return None

    def keep_run(self, result: bytes) -> None:
        """On rank 0: keep what became of a run for workers that come later."""
        assert self._port is not None
        _past.setdefault(self._port, {})[_runs[self._port]] = result

    def take_run(self) -> ExternalCoordinator:
        """The hub of the run that begins."""
        if self._found is None:
            self.find_run()
        found, self._found = self._found, None
        assert found is not None and self._port is not None
        _newest[self._port] = found
        return found

    @property
    def newest_hub(self) -> ExternalCoordinator | None:
        """Where workers meet behind a run; None where ranks are processes of this one."""
        return None if self._port is None else _newest.get(self._port)

    def _close_hub(self) -> None:
        """Leave the last run for good: whoever dies from here on is no loss to it."""
        if self._port is not None and self._port in _newest:
            _newest.pop(self._port).close()

    def _hub_of(self, port: int, run: int) -> ExternalCoordinator:
        near, placement = self.node_rank == 0, self.placement
        hub = ExternalCoordinator(
            self.global_rank, self.world_size, port, run, island_size=self.island_size, hosts=self._hosts,
            is_near=near, num_far=len(placement.far), restarts=self.restarts, past=_past.get(port),
        )  # fmt: skip
        if self._hosts is not None and not near and self.local_rank == 0 and not hub.line.is_new:
            start_servers(self._hosts, self.node_rank, placement.on(self.node_rank))
        return hub
