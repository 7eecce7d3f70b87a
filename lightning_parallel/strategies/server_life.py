"""How a worker's run with servers begins and ends: it finds the hub, has servers started, joins them, leaves.

The one idea: no default process group, since with one Lightning waits for rank 0 before every batch; the hub is where
workers meet, and where servers are asked for. Left out: steps (``server_steps.py``), checkpoints
(``server_states.py``).
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_parallel.parameter_server.consistency import Sandblaster
from lightning_parallel.parameter_server.consistency_names import gap_bound
from lightning_parallel.parameter_server.job import Job
from lightning_parallel.parameter_server.trainer.coordination.hosts import watch
from lightning_parallel.parameter_server.trainer.coordination.new_worker import load_state, state_of
from lightning_parallel.parameter_server.trainer.coordination.run_coordinator import SERVE
from lightning_parallel.parameter_server.trainer.coordination.run_coordinator_client import JOIN, first_of
from lightning_parallel.parameter_server.trainer.filter_residuals import take_up
from lightning_parallel.parameter_server.trainer.rows.dealt_rows import DealtRows
from lightning_parallel.parameter_server.trainer.rows.evaluation_rows import EvaluationRows
from lightning_parallel.parameter_server.trainer.rows.prediction_rows import PredictionRows
from lightning_parallel.parameter_server.trainer.sandblaster.batch_worker import BatchWorker, refuse_steps
from lightning_parallel.parameter_server.trainer.server_plan import ServerPlan
from lightning_parallel.parameter_server.trainer.shared_values import MetricGather, connect_metrics
from lightning_parallel.parameter_server.trainer.versions import Versions
from lightning_parallel.parameter_server.trainer.worker import ServerWorker
from lightning_parallel.parameter_server.transport.session import WorkerSession
from lightning_parallel.parameter_server.worker.island import Island
from lightning_parallel.strategies.server_runs import ServerRuns
from lightning_parallel.trainer.failure.exception_hooks import warn_of_unsaved
from lightning_parallel.trainer.refusals import refuse_synchronised_norms
from lightning_parallel.trainer.shown_values import read_when_shown
from lightning_parallel.zero.optimizer.guarded_state import GuardedState, held_state

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


_WORDS = (
    "The states of {name} are on the servers, and this reads those of a worker, which has none. Call"
    " trainer.strategy.optimizer_state(optimizer) on all ranks: rank 0 gets the state dict that one process would have."
)
_LAST_WORDS_S = 10.0  # how long servers are waited for after a failure


class ServerLife(ServerRuns):
    """A strategy whose ranks take part in a job of servers."""

    island: Island | None = None
    worker: ServerWorker | None = None
    rows: DealtRows | None = None
    evaluations: EvaluationRows | None = None
    versions: Versions | None = None
    _plan: ServerPlan | None = None
    _job: Job | None = None
    _left_behind: Sequence[dict[str, Any]] = ()  # by the workers of a checkpoint
    _undo: Callable[[], None] | None = None

    def setup_environment(self) -> None:
        if self.num_nodes > 1 and self._line is not None:
            raise ValueError(
                f"{type(self).__name__}(start_method={self.start_method!r}) starts workers of one host, got"
                f' num_nodes={self.num_nodes}. Use torchrun or SLURM, or start_method="popen".'
            )
        if self.num_processes % self.island_size:
            raise ValueError(
                f"{type(self).__name__}(island_size={self.island_size}) got {self.num_processes} devices, which are no"
                f" whole number of islands. Use a multiple of {self.island_size}."
            )
        ParallelStrategy.setup_environment(self)
        self.set_world_ranks()
        if self._line is None:
            self._line = self.take_run().line
        self._line.is_alone = self.world_size == 1
        self.watch = cast(Any, self._line)
        launcher = cast(Any, self.launcher)
        if hasattr(launcher, "joined"):
            launcher.joined(self.watch)

    def setup(self, trainer: Trainer) -> None:
        ParallelStrategy.setup(self, trainer)
        assert self._line is not None
        together = isinstance(self.wishes.consistency, Sandblaster)
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_synchronised_norms(self, "sees a worker's own rows", "larger batches, or norms of single rows")
            if self.world_size > 1:
                warn_of_unsaved(trainer, self.why_nothing_is_saved)
        if together:
            refuse_steps(trainer, type(self).__name__)
        self.rows = DealtRows(trainer, self._line, self._meet, self._welcome, together)
        kind = PredictionRows if trainer.predicting else EvaluationRows
        self.evaluations = kind(trainer, self._line, self._meet)
        if self._line.is_new:
            trainer.num_sanity_val_steps = 0  # it has no weights yet
        self._read_shown = read_when_shown(trainer)
        self._undo = connect_metrics(self._module, MetricGather(self.all_gathered, lambda: not self._in_step))

    def model_to_device(self) -> None:
        self._module.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers that are still there; at the start of a fit, start the servers."""
        if self._line is None:
            if self.newest_hub is not None:  # `trainer.save_checkpoint` after the run
                self.newest_hub.line.meet(f"barrier {name or ''}".rstrip())
            return
        self._meet(f"barrier {name or ''}".rstrip())
        if name == "run-stage" and self._module.trainer.state.fn == TrainerFn.FITTING and self.optimizers:
            self._start()

    def _start(self) -> None:
        """Have servers started with rank 0's weights and optimizer state, and join them."""
        assert self._line is not None
        module, line = self._module, self._line
        plan = self._plan = ServerPlan(self.wishes, self.optimizers, self.num_islands, type(self).__name__)
        if line.is_new:
            return  # until it is let in
        begins = plan.beginning() if self.global_rank == 0 else None
        self._job = pickle.loads(first_of(line.meet_raw(SERVE, begins), self.global_rank))
        if self._hosts is not None:
            self._job = self._hosts.place(self._job, line.connection)
        if self.island_size > 1:
            self.island = self._found_island()
        worker = self._take_part()
        rest = {name: value.cpu() for name, value in plan.not_held(module).items()} if self.global_rank == 0 else None
        module.load_state_dict(first_of(line.meet("what servers do not hold", rest), 0), strict=False)
        worker.pull()
        worker.session.await_replicas()
        self.worker = worker
        if plan.has_optimizer_on_servers and not isinstance(worker, BatchWorker):
            for optimizer in self.optimizers:
                name = type(optimizer).__name__
                optimizer.state = GuardedState(optimizer.state, _WORDS.format(name=name))  # type: ignore[assignment]

    def _take_part(self, era: int = 0) -> ServerWorker:
        assert self._line is not None and self._plan is not None and self._job is not None
        line, bound = self._line, gap_bound(self.wishes.consistency)
        self.versions = Versions(self.num_islands, bound, lambda since: line.ask("order", since), self.everyone)
        worker = self._plan.join(
            self._job, self.global_rank, self.versions, self.timeout.total_seconds(), era, self.island
        )
        if self.rows is not None:
            worker.before_push = self.rows.note
        if isinstance(worker, BatchWorker):
            worker.line = line
            worker.come_to = self.rows.come_to if self.rows is not None else worker.come_to
        if self._hosts is not None:
            client = worker.session.client
            watch(line.connection, lambda: setattr(client, "lost", True))  # its reads wait for nothing any more
        filters = worker.session.client.filters
        if filters is not None and self._left_behind and not line.is_new:
            own = self.global_rank // self.island_size
            take_up(filters, self._plan.table, self._left_behind, own, self.num_islands, self.wishes.scale)
        return worker

    def _found_island(self) -> Island:
        """Meet the other members of this worker's island, by a file that its first member names."""
        assert self._line is not None
        first, place = self.global_rank - self.global_rank % self.island_size, self.global_rank % self.island_size
        path = tempfile.mkdtemp(prefix="island-") + "/store" if not place else None
        path = self._line.meet("the islands", path)[first]
        island = Island(path, place, self.island_size, self.root_device, self.timeout, self._line.stuck)
        self._line.meet("the islands, connected")
        if not place:
            shutil.rmtree(Path(path).parent)
        return island

    def _welcome(self) -> int:
        """Let new workers in, or be one; the epoch that begins. All go on from one clock."""
        assert self._line is not None and self._plan is not None
        trainer, rest = self._module.trainer, self._plan.not_held(self._module)
        state = None
        if self.global_rank == 0 and self.worker is not None:
            assert self._job is not None
            turn = 0 if self.rows is None else self.rows.turn
            state = (replace(self._job, keys=None), self.worker.era + 1, state_of(trainer, rest), turn)
        job, era, state, turn = first_of(self._meet(JOIN, state), 0)
        if self._line.is_new:
            self._job = job if self._hosts is None else self._hosts.place(job, self._line.connection)
            load_state(trainer, state)
            if self.rows is not None:
                self.rows.turn = turn
            worker = self._take_part(era)
            self._line.is_new = False
            worker.pull()
            self.worker = worker
        self._meet("the new workers' first read")
        return trainer.current_epoch

    def teardown(self) -> None:
        failed = self.failed
        self.hooks_are_over()
        for optimizer in self.optimizers:
            optimizer.state = held_state(optimizer)  # type: ignore[assignment]
        if self.watch is not None and not failed:
            self._keep_weights()
            self._keep_optimizer()
            self.barrier("teardown")
        if self._undo is not None:
            self._undo()
            self._undo = None
        self._read_shown(failed)
        try:
            if self.worker is not None:
                self.worker.close(failed)
        finally:
            self.worker, self._line, self.rows, self.island, self.evaluations = None, None, None, None, None
            if not getattr(self.launcher, "will_part", False):  # hooks are still to come, which may fail
                self._stop_watch()
            if failed or self.world_size == 1:  # one worker meets nobody behind the run
                self._close_hub()
        ParallelStrategy.teardown(self)

    def prepare_saving(self) -> None:
        session = None if self.worker is None else self.worker.session
        if isinstance(session, WorkerSession):
            session.timeout = min(session.timeout, _LAST_WORDS_S)

    def _keep_optimizer(self) -> None:
        """Leave what servers have of the optimizer's state with rank 0's, for a checkpoint after the run."""
        if self.worker is not None:
            optimizer = self.worker.optimizer
            optimizer.load_state_dict(self.optimizer_state(optimizer))

    def _step_aside(self) -> None:
        if self.worker is not None:
            self.worker.pause()
