"""What `ZeROStrategy` does in a step: it tells its engine where Lightning's loops are.

The one idea: Lightning's own steps run, and an engine is told before and behind them.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.strategies.zero_checkpoints import ZeROCheckpoints
from lightning_parallel.trainer.step.parameter_writes import fingerprint, refuse_written
from lightning_parallel.zero.deepspeed.engine import DeepSpeedEngine
from lightning_parallel.zero.fsdp2.engine import ShardedEngine


class ZeROSteps(ZeROCheckpoints):
    """The part of `ZeROStrategy` that runs steps."""

    _weights_of_step: list[int] | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.begin_step()
        with self.engine.looking_at_steps():
            output = super().training_step(*args, **kwargs)
        self._weights_of_step = self._fingerprint()
        return output

    def _fingerprint(self) -> list[int] | None:
        """Of what will be gathered anew for the backward."""
        assert self.lightning_module is not None
        held = self.engine.gathered_anew()
        return fingerprint(self.lightning_module, held) if held else None

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's backward; gradients are reduced while it runs, before `on_after_backward`."""
        module = self.lightning_module
        assert module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if module.automatic_optimization:
            why = "weights are gathered anew for it"
            refuse_written(self._weights_of_step, self._fingerprint(), f"{type(self).__name__}(stage=3)", why)
        with self.engine.backward():
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        return self.precision_plugin.post_backward(closure_loss, module)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, and behind it no rank computes with weights of before."""
        stepped = super().optimizer_step(optimizer, *args, **kwargs)
        if isinstance(self._engine, ShardedEngine):
            self._engine.check_states(optimizer)
        self._free_gathered()
        return stepped

    @contextmanager
    def block_backward_sync(self) -> Any:
        """Around batches whose gradients accumulate: stage 1 moves nothing until the last of them."""
        with self.engine.accumulating():
            yield

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm over all ranks' parts."""
        self.engine.clip(list(self.precision_plugin.main_params(optimizer)), float(clip_val))

    def on_validation_start(self) -> None:
        if self._engine is not None:
            self._engine.begin_evaluation()

    on_train_end = on_validation_start

    def held_gradients(self) -> list[Tensor]:
        """Gradients that DeepSpeed holds away from their parameters, for callbacks."""
        return self._engine.held_gradients() if isinstance(self._engine, DeepSpeedEngine) else []

    def _free_gathered(self) -> None:
        """Free what FSDP2 keeps gathered behind a forward without a backward."""
        if isinstance(self._engine, ShardedEngine):
            self._engine.free_gathered()

    def _after_evaluation_step(self) -> None:
        assert self.lightning_module is not None
        loop: Any = self.lightning_module.trainer._active_loop
        if self._engine is not None:
            self._engine.after_evaluation_step(loop.batch_progress.is_last_batch)

    def prepare_saving(self) -> None:
        self._free_gathered()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's; hooks behind it find parameters divided, as they do behind a training step."""
        with nullcontext() if self._engine is None else self._engine.looking_at_steps():
            output = super().validation_step(*args, **kwargs)
        self._after_evaluation_step()
        return output

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `validation_step`."""
        with nullcontext() if self._engine is None else self._engine.looking_at_steps():
            output = super().test_step(*args, **kwargs)
        self._after_evaluation_step()
        return output

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `validation_step`."""
        with nullcontext() if self._engine is None else self._engine.looking_at_steps():
            output = super().predict_step(*args, **kwargs)
        self._after_evaluation_step()
        return output
