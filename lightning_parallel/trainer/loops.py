"""What a strategy changes about the Trainer's loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def leave_inference_mode(trainer: Trainer) -> None:
    """Evaluate under `no_grad`: parameters that are gathered in inference mode could not be trained."""
    loops: list[Any] = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]
    for loop in [*loops, trainer.predict_loop]:
        loop.inference_mode = False
