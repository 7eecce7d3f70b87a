"""`MeshStrategy`: what all strategies of this library share, whatever they parallelise.

The one idea: ranks form a named mesh. Launching, ranks, sampler, reductions and failures are told here once, by axis:
what Lightning means by "all processes that see different rows" is the data axis, what it means by "all processes" the
mesh. Left out: anything a model's parameters or steps undergo; that is the subclass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lightning_parallel.checkpoint.files import refuse_foreign
from lightning_parallel.failure.aborts import abort_device_groups
from lightning_parallel.failure.patience import Patience
from lightning_parallel.failure.watch import Watch
from lightning_parallel.mesh import build_mesh, connect, disconnect, open_groups, open_store
from lightning_parallel.secret import SECRET, Secret
from lightning_parallel.strategies.arguments import refuse_lazy
from lightning_parallel.strategies.saving import SavesAfterFailure
from lightning_parallel.trainer.failure.reports import report_exception, trainer_of
from lightning_parallel.trainer.failure.sigterm import Restore, replace_sigterm_broadcast
from lightning_parallel.trainer.shown_values import read_when_shown
from lightning_parallel.trainer.state.checkpoint_io import AtomicCheckpointIO, given, leave_weights
from lightning_parallel.trainer.state.weight_callbacks import states_of_holders

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision

_LATE = timedelta(seconds=25)  # how long ranks wait for each other after a run
_TRAINED = ("_lightning_module", "_model", "_optimizers", "_lightning_optimizers", "lr_scheduler_configs")
StartMethod = Literal["popen", "fork", "spawn"]


@cache
def _say_once() -> None:
    rank_zero_info(
        "This run has no secret, so an exception of one rank is raised on the others as a StageError with its words,"
        f" not as its own class. Set {SECRET} to 16 or more characters, the same for all ranks."
    )


def _reads_nothing(failed: bool) -> None:
    """What is shown is no device's."""


class MeshStrategy(SavesAfterFailure):
    """A strategy whose ranks form a named mesh.

    Args:
        start_method: how `Trainer` starts the other ranks of this host: "popen" runs the script again (the default),
            "fork" works in notebooks, "spawn" in scripts without side effects. Under torchrun or SLURM none is used.
        timeout: how long a collective may take before it fails.
        patience: how long to wait for ranks without a sign of life, or that all wait for each other; see `Patience`.
    """

    def __init__(
        self,
        start_method: StartMethod = "popen",
        timeout: timedelta = timedelta(minutes=30),
        patience: Patience | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if start_method not in ("popen", "fork", "spawn"):
            raise ValueError(f'start_method={start_method!r}: use "popen" (scripts), "fork" (notebooks) or "spawn".')
        if patience is not None and not isinstance(patience, Patience):
            raise ValueError(
                f"patience={patience!r}: use lightning_parallel.failure.patience.Patience(...), seconds by name."
            )
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise ValueError(f"timeout={timeout!r}: use datetime.timedelta(minutes=...), above 0.")
        super().__init__(
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io or AtomicCheckpointIO(),
            precision_plugin=precision_plugin,
        )
        self.start_method, self.timeout, self.patience = start_method, timeout, patience
        self.num_nodes = 1
        self.watch: Watch | None = None
        self._at_rest: dict[str, Any] | None = None  # attributes before the first run
        self._restore_sigterm = Restore()
        self._read_shown: Callable[[bool], None] = _reads_nothing

    # -- ranks and devices ---------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero decorators who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, fabric_rank_zero_only):
            decorator.rank = self.global_rank  # type: ignore[attr-defined]

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        from lightning_parallel.trainer.launch.launchers import make_launcher

        self._launcher = make_launcher(self)

    def connect(self, model: LightningModule) -> None:
        refuse_lazy(model, type(self).__name__)
        if self._at_rest is None:
            self._at_rest = dict(vars(self))
        super().connect(model)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the strategy as it was before its first run, with what it has trained, but for
        a run that is under way (which has threads, sockets, groups and parts of a model)."""
        state: dict[str, Any] = super().__getstate__()
        if self._at_rest is None:
            return state
        trained = () if self.is_connected else _TRAINED
        return {**self._at_rest, **{name: value for name, value in state.items() if name in trained}}

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        environment, rank, world = self.cluster_environment, self.global_rank, self.world_size
        assert environment is not None
        host, device = environment.main_address, self.root_device
        store = open_store(host, environment.main_port, rank, world, self.timeout)
        secret = Secret.of_run() if world > 1 else None
        self.watch = Watch(rank, world, store, host=host, patience=self.patience, secret=secret)
        if world > 1 and secret is None:
            _say_once()
        self._store, self._updates, self._is_updating, self._meetings = store, 0, False, 0
        with self.watch.opening():
            connect(store, rank, world, device, self.timeout)
            self._mesh = build_mesh(device.type, self.axes())
            self._groups = open_groups(self.axes(), self.planes)
            self._barriers = dist.new_group(backend="gloo") if world > 1 else None
        launcher = cast(Any, self.launcher)
        if hasattr(launcher, "joined"):  # all ranks are there: from now on the watch finds out who is gone
            launcher.joined(self.watch)
        if device.type == "cuda":
            self.watch.on_abort(abort_device_groups)

    @contextmanager
    def opening_groups(self) -> Iterator[None]:
        """A context in which more groups are made, once every rank is about to: nothing frees one that waits inside."""
        assert self.watch is not None
        self.barrier("process groups are made")
        with self.watch.opening():
            yield

    def let_host_run_ahead(self, trainer: Trainer) -> None:
        """Between batches wait for no device: agree on SIGTERM by the watch, and read what a progress bar shows when it
        shows it; for `setup` of a subclass to call."""
        self._read_shown = read_when_shown(trainer)
        if self.watch is not None and self.world_size > 1:
            self._restore_sigterm = replace_sigterm_broadcast(trainer, self.watch)

    def on_train_end(self) -> None:
        """A rank that was told to end in the very last batch ends as in any other, and all ranks with it."""
        super().on_train_end()
        self._end_if_told()

    def _end_if_told(self) -> None:
        if self.watch is not None and getattr(self.watch, "is_told_to_end", False) and not self.failed:
            raise SIGTERMException

    def on_exception(self, exception: BaseException) -> None:
        report_exception(self, exception)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """The host's groups; opened for a while where the run has ended (`trainer.save_checkpoint` after `fit`)."""
        environment = self.cluster_environment
        if dist.is_initialized() or self.world_size == 1 or environment is None or self.ranks_have_ended:
            yield
            return
        rank, world = self.global_rank, self.world_size
        try:
            store = open_store(environment.main_address, environment.main_port, rank, world, _LATE)
            connect(store, rank, world, torch.device("cpu"), _LATE)
        except (dist.DistError, RuntimeError) as error:
            raise RuntimeError(
                f"Rank {rank} waited {_LATE.seconds} s for the other ranks, to gather the model's state after the run."
                " Every rank has to call trainer.save_checkpoint, not rank 0 alone."
            ) from error
        try:
            self._groups = open_groups(self.axes(), self.planes)
            yield
            self.barrier("connected")
        finally:
            disconnect()

    @property
    def ranks_have_ended(self) -> bool:
        """Whether this process forked or spawned the ranks of a fit: it has the trained weights, and no more."""
        return bool(getattr(self.launcher, "has_fitted", False))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self.ranks_have_ended:
            leave_weights(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, **given(weights_only))
        refuse_foreign(checkpoint, Path(checkpoint_path))
        return checkpoint

    def raise_failure(self) -> None:
        """Raise the failure of this run if there is one, before waiting for ranks that may be gone.

        Raises:
            Exception: the failure of the run.
        """
        error = self.watch.cause(0.0) if self.watch is not None and self.failed and not self._is_saving else None
        if error is not None:
            raise error from error.__cause__

    @property
    def failed(self) -> bool:
        """Whether this run has failed, on whichever rank."""
        return self.watch is not None and self.watch.failure is not None

    def teardown(self) -> None:
        failed = self.failed
        untold = self._untold()
        self.hooks_are_over()
        self._restore_sigterm()
        self._read_shown(failed)
        if self.watch is not None and not failed:
            self._keep_weights()
            self._end_if_told()
            self.barrier("teardown")
        self._mesh = self._barriers = None
        try:
            disconnect(failed)
        finally:
            if not getattr(self.launcher, "will_part", False):  # hooks are still to come, which may fail
                self._stop_watch()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        if untold is not None:
            raise untold from untold.__cause__

    def _untold(self) -> BaseException | None:
        """What the run has failed of, if this rank would end as if it had not."""
        if self.watch is None or not self.failed or getattr(self.launcher, "will_part", False):
            return None
        return None if sys.exc_info()[1] is not None else self.watch.cause(0.0)

    def part(self) -> None:
        """After the last hooks of a run: wait for those of the other ranks.

        Raises:
            Exception: what they have failed of.
        """
        self._end_if_told()
        if self.watch is not None:
            self.watch.part()
        self._stop_watch()

    def _stop_watch(self) -> None:
        if self.watch is not None:
            self.watch.stop()
        self.watch = None

    def _keep_weights(self) -> None:
        """Forked and spawned ranks end with the run: hand the trained weights to the process that started them."""
        module, launcher = self.lightning_module, cast(Any, self.launcher)
        if not hasattr(launcher, "keep_weights") or module is None:
            return
        trainer = trainer_of(self)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            launcher.keep_weights(self.lightning_module_state_dict, partial(states_of_holders, trainer, module))

    def blocked(self, what: str) -> AbstractContextManager[None]:
        """A context for what waits for other ranks: a rank that waits for ever is found, and told why."""
        return nullcontext() if self.watch is None else self.watch.blocked(what)

    def setup(self, trainer: Trainer) -> None:
        raise NotImplementedError
