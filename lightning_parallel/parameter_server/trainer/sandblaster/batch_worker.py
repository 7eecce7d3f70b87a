"""What a worker does in steps that all workers make together (Sandblaster): portions of the step's rows, for L-BFGS.

    all meet: rows of the step -> rank 0's coordinator: torch's L-BFGS, whose vectors lie on the servers
    every worker: portion and point <- manager, servers; user's step on the portion's rows -> gradient to the servers
    all meet: the end of the step -> read the weights

The one idea: Lightning's closure is evaluated for a portion by putting the portion's batch in the place of the worker's
own, whose portion is the one it prefers. A portion weighs by its rows. Left out: what a step is (``coordinator.py``),
who does which portion (``parameter_server/manager/sharing.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_parallel.parameter_server.messages import Copy
from lightning_parallel.parameter_server.trainer.coordination.run_coordinator_client import END, RunCoordinatorClient
from lightning_parallel.parameter_server.trainer.sandblaster.coordinator import Clipping, SandblasterCoordinator
from lightning_parallel.parameter_server.trainer.worker import ServerWorker, replaced
from lightning_parallel.parameter_server.transport.errands import Helping
from lightning_parallel.pipeline.batch.rows import count_rows

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_NO_BATCH = object()


class BatchWorker(ServerWorker):
    """A worker whose steps are of all workers together; see `ServerWorker` for the other arguments.

    Attributes:
        helping: its portions come from there.
        coordinator: rank 0's.
        line: to the hub.
        come_to: how far this worker is with its rows, see `DealtRows`.
        batch: of this worker, in the step that begins.
        portion: rows that the user's step is to have in place of its own.
        clips: how the gradient of a step is clipped.
    """

    helping: Helping
    line: RunCoordinatorClient
    coordinator: SandblasterCoordinator | None = None
    come_to: Callable[[], tuple[int, int] | None] = staticmethod(lambda: None)
    batch: Any = None
    portion: Any = _NO_BATCH
    clips = Clipping()

    @property
    def has_portion(self) -> bool:
        """Whether the user's step is being evaluated for a portion."""
        return self.portion is not _NO_BATCH

    @contextmanager
    def clipping(self, trainer: Trainer) -> Iterator[None]:
        """Around Lightning's step: the gradient of all rows is clipped, on the servers, rather than a portion's."""
        limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        self.clips = Clipping(limit, "norm" if algorithm is None else str(algorithm.value))
        trainer.gradient_clip_val = None
        try:
            yield
        finally:
            trainer.gradient_clip_val = limit

    def step(self, run: Callable[[], Any]) -> Any:
        """Run Lightning's step, in which the optimizer's is one of all workers."""
        self._held.check()
        with replaced(self.optimizer, self._step):
            return run()

    def _step(self, closure: Callable[[], Any]) -> Any:
        self.refuse_written()
        last = 0 if self.coordinator is None else self.coordinator.last_batch
        own = (rows_of(self.batch), last)
        everyone = self.line.step(move_data_to_device(self.batch, "cpu"), self.come_to(), own)
        rows, ranks, last = {rank: count for rank, (count, _) in everyone.items()}, list(everyone), everyone[0][1]
        self.helping.helper.prefers = ranks.index(self._rank)
        if self.coordinator is not None:
            self.coordinator.begin(len(ranks), self.clips)
        else:
            self.line.await_end()
        done = self._do_portions(closure, rows, ranks, last)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask
        if self.coordinator is not None:
            self.line.meet(END)
        else:
            self.line.end()
        self.pull()
        if not done:  # Lightning wants something that the step returned, and its logged values
            self._evaluate(closure, self.batch)
        return self._loss

    def _do_portions(self, closure: Callable[[], Any], rows: Mapping[int, int], ranks: list[int], last: int) -> int:
        """Do what the manager hands out, until the step is over; how much that was."""
        batches, done, total = {self._rank: self.batch}, 0, sum(rows.values())
        over = lambda: self.line.has_ended if self.coordinator is None else self.coordinator.is_done  # noqa: E731
        while (work := self.helping.next(over, last)) is not None:
            rank, point = ranks[work[0]], work[1]
            if rank not in batches:
                batches[rank] = move_data_to_device(self.line.batch_of(rank), self.staging.device)
            self.staging.into(point.to(torch.float32), self.parameters)
            loss, gradient = self._evaluate(closure, batches[rank])
            weight, done = rows[rank] / total, done + 1
            self.helping.give(weight * loss, gradient.mul_(weight))
        return done

    def _evaluate(self, closure: Callable[[], Any], batch: Any) -> tuple[float, Tensor]:
        """The user's step on a batch: its loss, and its gradient, shape (size,), float64."""
        self.portion = batch
        try:
            with torch.enable_grad():
                self._loss = closure()
        finally:
            self.portion = _NO_BATCH
        gradients = [[parameter.grad for parameter in group] for group in self.parameters]
        return float(self._loss), self.staging.out(self.staging.pack(gradients)).to(torch.float64)

    def state(self, copies: Mapping[int, Copy]) -> dict[int, Any]:
        """Of rank 0's optimizer, see `SandblasterCoordinator.state`."""
        return {} if self.coordinator is None else self.coordinator.state(copies)

    def close(self, failed: bool) -> None:
        if failed:
            self.helping.helper.lost = True
        if self.coordinator is not None:
            self.coordinator.close(failed)
        self.helping.close()
        super().close(failed)


def rows_of(batch: Any) -> int:
    """The rows of a batch.

    Raises:
        ValueError: it has no tensor with a first dimension.
    """
    try:
        return count_rows(batch)
    except ValueError:
        raise ValueError(
            f'consistency="sandblaster" weighs a portion by its rows, and a batch of type {type(batch).__name__} has no'
            " tensor with a first dimension to count them by. Give the batch one tensor with one entry a row."
        ) from None


def refuse_steps(trainer: Trainer, name: str) -> None:
    """Raise for a fit whose steps cannot be evaluated in portions.

    Raises:
        ValueError: manual optimization, accumulation, clipping of the module's own, or a step that takes an iterator.
    """
    module, name = trainer.lightning_module, f'{name}(consistency="sandblaster")'
    if trainer.state.fn != TrainerFn.FITTING or module is None:
        return
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} evaluates Lightning's closure on portions of a step's rows, and manual optimization has a closure"
            " of its own. Set self.automatic_optimization = True, or use ZeROStrategy(stage=2), which runs it as it is."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"{name} got accumulate_grad_batches={trainer.accumulate_grad_batches}, but an L-BFGS evaluates its step's"
            " rows again and again. Use accumulate_grad_batches=1, and a larger batch."
        )
    if is_overridden("configure_gradient_clipping", module):
        raise ValueError(
            f"{name} has the servers clip the gradient of all rows, but {type(module).__name__} has a"
            " configure_gradient_clipping of its own, which would see a portion's. Use Trainer(gradient_clip_val=...)."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(f"{name} has others do a worker's rows, and cannot run training_step(dataloader_iter).")
