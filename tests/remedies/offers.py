"""Messages and what they propose, each as two calls in one process: what is refused, and what the message says instead.

The one idea: a message's own text is what the refusal has to say, so that an entry is its key and two calls. Left out:
what needs several ranks.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, ParameterServerStrategy, PipelineStrategy, ZeROStrategy, callbacks
from lightning_parallel.checkpoint import load_weights, room, sharded
from lightning_parallel.parameter_server.consistency_names import rule_of
from lightning_parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader, rows
from tests.trainer.pipelines import make_trainer
from tests.trainer.test_uncut_batches import Gan


@dataclass(frozen=True)
class Offer:
    """What a message is about.

    Attributes:
        refused: ends in the message, or warns of it; gets an empty folder.
        followed: does what it proposes.
        is_slow: whether it is left to the slow tests.
    """

    refused: Callable[[Path], Any]
    followed: Callable[[Path], Any]
    is_slow: bool = False


def made(kind: Callable[..., Any], wrong: dict[str, Any], *right: dict[str, Any]) -> Offer:
    """Arguments that do not go together, and ones that do."""
    return Offer(lambda folder: kind(**wrong), lambda folder: [kind(**arguments) for arguments in right])


def fit(
    strategy: Any, make: Callable[[], Any] = Classifier, batches: Sequence[Any] | None = None, **options: Any
) -> None:
    """A short run in this process."""
    loader = row_loader() if batches is None else DataLoader(list(batches), batch_size=None)
    module = make()
    validates = is_overridden("validation_step", module)
    make_trainer(strategy, 1, **options).fit(module, loader, loader if validates else None)


class Uncut(Classifier):
    """Reads rows out of whatever a batch is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(rows_in(batch)).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Object:
    """An object of the user's that holds rows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@dataclasses.dataclass
class Fields:
    """The same as a dataclass."""

    x: Tensor


def rows_in(batch: Any) -> Tensor:
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "data"):
        return rows_in(batch[-1])
    if isinstance(batch, dict):
        return batch["x"]
    found = batch if isinstance(batch, Tensor) else batch.data if hasattr(batch, "data") else batch.x
    return found.to_dense() if found.layout != torch.strided else found


def uncut(batch: Callable[[], Any], *instead: Callable[[], Any]) -> Offer:
    """A batch that two micro-batches cannot share; it runs in one, and others run in two."""

    def followed(folder: Path) -> None:
        fit(PipelineStrategy(num_microbatches=1), Uncut, [batch()])
        for other in instead:
            fit(PipelineStrategy(num_microbatches=2), Uncut, [other()])

    return Offer(lambda folder: fit(PipelineStrategy(num_microbatches=2), Uncut, [batch()]), followed)


X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


def packed() -> Any:
    return pack_padded_sequence(X.view(8, 1, WIDTH), torch.ones(8, dtype=torch.long), batch_first=True)


class OneLayer(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, CLASSES))


class WithLbfgs(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


def servers(**arguments: Any) -> ParameterServerStrategy:
    return ParameterServerStrategy(start_method="popen", **arguments)


def file_of(folder: Path, **tensors: Tensor) -> Path:
    save_file(tensors, path := folder / "weights.safetensors")
    return path


def trained_into(folder: Path, **kept: Any) -> None:
    checkpoint = ModelCheckpoint(dirpath=folder / "elsewhere", **kept)
    fit(PipelineStrategy(), callbacks=[checkpoint], enable_checkpointing=True)
    assert list((folder / "elsewhere").glob("*.ckpt"))


def without_room(folder: Path) -> None:
    with room.room_for(folder / "a.ckpt", {"w": X}):
        raise OSError(errno.ENOSPC, "No space left on device")


def sharded_folder(folder: Path) -> Path:
    trainer = make_trainer(PipelineStrategy(state_dict_type="sharded"), 1)
    trainer.fit(Classifier(), row_loader(), row_loader())
    trainer.save_checkpoint(path := folder / "whole.ckpt")
    return path


def emptied(folder: Path) -> Path:
    (path := folder / "none.ckpt").mkdir()
    return path


DYNAMIC = {"dynamic_shapes": True}

OFFERS: dict[str, Offer] = {
    "callbacks.stats.require_stats": Offer(
        lambda folder: fit("auto", callbacks=[callbacks.BubbleMonitor()]),
        lambda folder: [fit("pipeline_1f1b", callbacks=[callbacks.BubbleMonitor()]), fit("auto")],
    ),
    "callbacks.staleness.StalenessMonitor.setup": Offer(
        lambda folder: fit("auto", callbacks=[callbacks.StalenessMonitor()]),
        lambda folder: fit("ssp", callbacks=[callbacks.StalenessMonitor()]),
    ),
    "checkpoint.room._words": Offer(
        without_room, lambda folder: trained_into(folder, save_top_k=1, save_weights_only=True)
    ),
    "checkpoint.sharded._whole": Offer(
        lambda folder: sharded.load_sharded(emptied(folder)),
        lambda folder: sharded.load_sharded(sharded_folder(folder))
    ),
    "checkpoint.weights._names_fit": Offer(
        lambda folder: load_weights(nn.Linear(2, 2, bias=False), file_of(folder, other=torch.ones(2, 2))),
        lambda folder: [
            load_weights(nn.Linear(2, 2, bias=False), file_of(folder, other=torch.ones(2, 2)), strict=False),
            load_weights(nn.Sequential(nn.Linear(2, 2, bias=False)), file_of(folder, weight=torch.ones(2, 2)), "0."),
        ],
    ),
    "parameter_server.consistency_names": made(rule_of, {"consistency": "late"}, {"consistency": "ssp"}),
    "parameter_server.consistency_names.rule_of": made(
        rule_of, {"consistency": "bsp", "staleness": 2}, {"consistency": "ssp", "staleness": 2}
    ),
    "parameter_server.trainer.server_plan.Wishes.__post_init__": Offer(
        lambda folder: servers(consistency="bsp", n_push=2),
        lambda folder: [fit(servers(consistency="bsp"), accumulate_grad_batches=2),
                        fit(servers(consistency="downpour", n_push=2))],
    ),
    "parameter_server.trainer.server_plan.Wishes._refuse_pushes": made(
        ParameterServerStrategy, {"consistency": "sandblaster", "update": "worker"}, {"consistency": "sandblaster"}
    ),
    "parameter_server.trainer.server_plan.ServerPlan.__init__": Offer(
        lambda folder: fit(servers(), Gan), lambda folder: fit(ZeROStrategy(stage=2), Gan)
    ),
    "parameter_server.trainer.server_plan.ServerPlan._update#2": Offer(
        lambda folder: fit(servers(), WithLbfgs), lambda folder: fit(servers(consistency="sandblaster"), WithLbfgs),
        is_slow=True,
    ),
    "parameter_server.trainer.sandblaster.batch_worker.refuse_steps#2": Offer(
        lambda folder: fit(servers(consistency="sandblaster"), WithLbfgs, accumulate_grad_batches=2),
        lambda folder: fit(servers(consistency="sandblaster"), WithLbfgs, rows((16,)), accumulate_grad_batches=1),
        is_slow=True,
    ),
    "pipeline.batch.uncuttable.refuse_what_cannot_be_cut": uncut(packed, lambda: (torch.ones(8), X)),
    "pipeline.batch.uncuttable._refuse_layout": uncut(lambda: (X, X.to_sparse()), lambda: (X, X)),
    "pipeline.batch.uncuttable._refuse_object": uncut(lambda: (X, Object(X)), lambda: (X, Fields(X))),
    "pipeline.batch.uncuttable._refuse_graph": uncut(
        lambda: {"x": X, "edge_index": torch.zeros(2, 8, dtype=torch.long)}, lambda: {"x": X, "edges": torch.eye(8)}
    ),
    "strategies.arguments.read_schedule": made(
        PipelineStrategy,
        {"schedule": one_f_one_b(2, 4), "num_microbatches": 8},
        {"schedule": one_f_one_b(2, 4)},
        {"schedule": "1f1b", "num_microbatches": 8},
    ),
    "strategies.base.MeshStrategy.__init__": made(
        PipelineStrategy, {"timeout": 5}, {"timeout": timedelta(minutes=5)}
    ),
    "strategies.hybrid.HybridStrategy.__init__": made(
        HybridStrategy, {"overlap_sums": True, "sequence_parallel": True}, {"overlap_sums": True},
        {"sequence_parallel": True},
    ),
    "strategies.hybrid.HybridStrategy.__init__#2": made(
        HybridStrategy, {"partition_activations": True}, {"partition_activations": True, "recompute": "block"}
    ),
    "strategies.hybrid_states.DividedPipeline.__init__": made(
        HybridStrategy, {"gather": "microbatch"}, {"gather": "microbatch", "zero_stage": 3}, {"gather": "step"}
    ),
    "strategies.hybrid_states.DividedPipeline.__init__#2": made(
        HybridStrategy, {"cuda_graphs": True, "zero_stage": 3}, {"zero_stage": 3}, {"cuda_graphs": True}
    ),
    "strategies.parameter_server.ParameterServerStrategy.__init__": made(
        ParameterServerStrategy, {"restarts": 1, "island_size": 2}, {"restarts": 0, "island_size": 2},
        {"restarts": 1, "island_size": 1},
    ),
    "strategies.parameter_server.ParameterServerStrategy.__init__#2": made(
        ParameterServerStrategy, {"consistency": "sandblaster", "restarts": 1}, {"consistency": "sandblaster"}
    ),
    "strategies.parameter_server.ParameterServerStrategy._configure_launcher": Offer(
        lambda folder: make_trainer(servers(restarts=1), 1),
        lambda folder: [make_trainer(ParameterServerStrategy(start_method="fork", restarts=1), 1),
                        make_trainer(servers(restarts=0), 1)],
    ),
    "strategies.pipeline_arguments": made(
        PipelineStrategy, {"memory_limit": 10**9}, {"memory_limit": 10**9, "schedule": "auto"}
    ),
    "strategies.pipeline_arguments#2": made(
        PipelineStrategy, {"skip_connections": True, **DYNAMIC}, DYNAMIC, {"skip_connections": True}
    ),
    "strategies.pipeline_arguments#3": made(
        PipelineStrategy, {"cuda_graphs": True, **DYNAMIC}, DYNAMIC, {"cuda_graphs": True}
    ),
    "strategies.pipeline_schedules.PipelineSchedules._refuse_schedule": Offer(
        lambda folder: fit(PipelineStrategy(cuda_graphs=True, num_microbatches=2)),
        lambda folder: fit(PipelineStrategy(cuda_graphs=False, num_microbatches=2)),
    ),
    "strategies.pipeline_schedules.PipelineSchedules._refuse_slices": Offer(
        lambda folder: fit(PipelineStrategy(slices=2, num_microbatches=2)),
        lambda folder: fit(PipelineStrategy(num_microbatches=2)),
    ),
    "strategies.zero_division.ZeRODivision._size_of_groups": Offer(
        lambda folder: fit(ZeROStrategy(stage=3, shard_size=2)), lambda folder: fit(ZeROStrategy(stage=3, shard_size=1))
    ),
    "strategies.zero_division.ZeRODivision._checkpoint_blocks": Offer(
        lambda folder: fit(ZeROStrategy(stage=2, activation_checkpointing=True), OneLayer),
        lambda folder: [fit(ZeROStrategy(stage=2, activation_checkpointing=["net"]), OneLayer),
                        fit(ZeROStrategy(stage=2), OneLayer)],
    ),
}  # fmt: skip
