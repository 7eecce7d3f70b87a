"""What DeepSpeed would divide otherwise than asked for, refused in words before it does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise for what DeepSpeed divides otherwise than asked for.

    Raises:
        ValueError: several optimizers, Adagrad, or a group in which nothing trains.
    """
    if len(optimizers) > 1:
        raise ValueError(
            f'ZeROStrategy(engine="deepspeed") got {len(optimizers)} optimizers, and DeepSpeed divides the states of'
            ' one. Use engine="native" or "fsdp2", or one optimizer with several groups.'
        )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Adagrad):
            raise ValueError(
                'ZeROStrategy(engine="deepspeed") got Adagrad, in whose place DeepSpeed makes another with one group.'
                ' Use engine="native" or "fsdp2", or another optimizer.'
            )
        idle = [i for i, g in enumerate(optimizer.param_groups) if not any(p.requires_grad for p in g["params"])]
        if idle:
            raise ValueError(
                f'ZeROStrategy(engine="deepspeed"): nothing in group {idle[0]} of {type(optimizer).__name__} requires a'
                " gradient, and DeepSpeed divides every group. Leave frozen parameters out of configure_optimizers."
            )


def refuse_parameters(module: nn.Module) -> None:
    """Raise for parameters that DeepSpeed cannot send or divide.

    Raises:
        ValueError: one has no dimension, or its gradients are sparse.
    """
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise ValueError(
                f'ZeROStrategy(engine="deepspeed"): parameter `{name}` has no dimension, and DeepSpeed sends bytes of'
                ' parameters that have. Make it one of shape [1] (torch.ones(1)), or use engine="native".'
            )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise ValueError(
                f'ZeROStrategy(engine="deepspeed"): the gradients of `{name}` are sparse, which DeepSpeed does not'
                " divide. Use sparse=False."
            )
