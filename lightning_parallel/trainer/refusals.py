"""What a pipeline does not do, said at set-up: what is, what was needed, what to do instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy


def refuse_unsupported(trainer: Trainer, strategy: Strategy) -> None:
    """Raise for what a pipeline cannot run as the module is written.

    Raises:
        ValueError: manual optimization, an overridden backward, an iterator step, or a gradient scaler.
        TypeError: the module is not a `lightning.pytorch.LightningModule`.
    """
    module, name = strategy.lightning_module, type(strategy).__name__
    if not isinstance(module, LightningModule):
        raise TypeError(f"{name} got a {type(module)}, it needs a lightning.pytorch.LightningModule.")
    if isinstance(strategy.precision_plugin, MixedPrecision) and strategy.precision_plugin.scaler is not None:
        raise ValueError(
            f'{name} does not support Trainer(precision="{strategy.precision_plugin.precision}"), whose gradient scaler'
            ' decides on each process alone. Use precision="bf16-mixed", "bf16-true" or 32.'
        )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} runs a step's backwards inside its schedule and cannot run manual optimization. Set"
            " self.automatic_optimization = True and move what follows the loss into hooks."
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__} overrides backward, which {name} never calls: the backwards run inside the"
            " schedule. Remove the override; on_before_backward and on_after_backward are called as ever."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{name} cuts batches into micro-batches and cannot run training_step(dataloader_iter). Take the batch."
        )
