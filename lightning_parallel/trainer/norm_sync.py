"""`Trainer(sync_batchnorm=True)` where every rank holds the model: torch's layers, on CPUs too."""

from __future__ import annotations

from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from torch import nn

from lightning_parallel.parallel.batch_statistics import SynchronisedBatchNorm


def apply_sync(layer_sync: LayerSync, model: nn.Module) -> nn.Module:
    """What a plugin makes of a model's norms; of torch's layers those that run everywhere."""
    model = layer_sync.apply(model)
    if isinstance(layer_sync, TorchSyncBatchNorm):
        for module in model.modules():
            if type(module) is nn.SyncBatchNorm:
                module.__class__ = SynchronisedBatchNorm
    return model
