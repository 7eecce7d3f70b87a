"""What a strategy with servers does with Lightning's steps and loaders.

The one idea: in steps a worker talks to servers alone (``ServerWorker``), and meets the others where an epoch or an
evaluation needs all. Left out: who takes part (``server_life.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.parameter_server.trainer.sandblaster.batch_worker import BatchWorker
from lightning_parallel.parameter_server.trainer.shared_values import average_into, running_statistics
from lightning_parallel.parameter_server.transport.session import LeaseLostError
from lightning_parallel.strategies.server_life import ServerLife


class ServerSteps(ServerLife):
    """A strategy whose steps are the servers'."""

    def process_dataloader(self, dataloader: object) -> object:
        """Have the rows of training loaders dealt by the hub, and those of evaluations among all who are there."""
        trainer = self._module.trainer
        if self.rows is not None and trainer.training:
            self.rows.take(dataloader)
        elif self.evaluations is not None and (trainer.evaluating or trainer.sanity_checking or trainer.predicting):
            self.evaluations.take(dataloader)
        return dataloader

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().predict_step(*args, **kwargs))

    def _evaluated(self, output: Any) -> Any:
        if self.evaluations is not None:
            self.evaluations.after_step()
        return output

    def on_validation_end(self) -> None:
        if self.evaluations is not None:
            self.evaluations.ended()

    on_test_end = on_predict_end = on_validation_end

    def on_train_start(self) -> None:
        if self.restarts and (self.rows is None or not self.rows.are_dealt):
            raise ValueError(
                f"{type(self).__name__}(restarts={self.restarts}): new workers join where rows are dealt to them, but"
                " the training loader deals for itself, or evaluations come within epochs. Use one loader with"
                " Lightning's sampler (use_distributed_sampler=True) and val_check_interval=1.0, or restarts=0."
            )

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lightning's step, with the servers' in place of the optimizer's; a step that is skipped ticks too."""
        if self.worker is None or self._line is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._line.check()
        closure, worker = self._averaging(closure), self.worker
        clips = worker.clipping(self._module.trainer) if isinstance(worker, BatchWorker) else nullcontext()
        try:
            with clips:
                result = worker.step(lambda: ParallelStrategy.optimizer_step(self, optimizer, closure, model, **kwargs))
        except LeaseLostError:
            self._line.check()  # the run may have failed, and the hub be gone
            raise
        if self.rows is not None:
            self.rows.after_step()
        return result

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(self.worker, BatchWorker):
            self.worker.batch = batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step; on the rows of a portion, where it is evaluated for one."""
        if isinstance(self.worker, BatchWorker) and self.worker.has_portion:
            args = (self.worker.portion, *args[1:])
        return super().training_step(*args, **kwargs)

    def _meet(self, what: str, value: Any = None) -> dict[int, Any]:
        if isinstance(self.worker, BatchWorker) and self.worker.has_portion:
            raise ValueError(
                f'{type(self).__name__}(consistency="sandblaster"): a step asks for {what} of all workers, but workers'
                " evaluate portions of a step as they are idle, and not equally many. Leave all_gather and broadcast"
                " to hooks outside of the step."
            )
        return super()._meet(what, value)

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Lightning's closure, after which gradients are the island's: before they are clipped, as under DDP."""
        island, worker = self.island, self.worker
        if island is None or worker is None:
            return closure

        def run() -> Any:
            value = closure()
            worker.announce()
            parameters = [parameter for group in worker.parameters for parameter in group]
            loss = island.average(parameters, value if isinstance(value, Tensor) else torch.zeros(()))
            return loss if isinstance(value, Tensor) else value

        return run

    def on_validation_start(self) -> None:
        if self.worker is not None:
            self.synchronize()

    def synchronize(self) -> None:
        """Give all workers the same weights, with everything in that any has pushed, and the same running statistics.

        Every worker calls it. Weights that a callback has put in the place of those which were read stay.
        """
        assert self.worker is not None
        self._meet("one version of the weights")
        if not self.worker.is_overwritten:
            self.worker.pull()
        buffers = running_statistics(self._module)
        everyone = self._meet("running statistics", {name: buffer.cpu() for name, buffer in buffers.items()})
        average_into(buffers, list(everyone.values()))
