"""`validate`, `test` and `predict` without `fit` hold a part of each parameter too, where micro-batches gather."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.harness import free_port, run_ranks
from tests.trainer.hybrids import Mesh, gpt, gpt_case, token_loader
from tests.trainer.pipelines import fit, join_as_torchrun, make_trainer

MESH = Mesh(2, 2, 1, {"zero_stage": 3, "gather": "microbatch", "schedule": "interleaved_1f1b", "bucket_mb": 1e-3})


class Closed(Callback):
    """Counts bytes of parameters between batches, by hand."""

    def __init__(self) -> None:
        self.counts: set[int] = set()
        self.own = 0

    def _count(self, trainer: Trainer, *_: Any) -> None:
        own = [parameter for _, parameter in trainer.strategy.pipeline.own]
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in own}
        self.own = sum(p.nbytes for p in own)
        self.counts.add(sum(storages.values()))

    on_test_batch_end = on_predict_batch_end = _count


def evaluated(path: Path, strategy: Any, devices: int, place: int) -> Any:
    torch.manual_seed(1)
    module: LightningModule = gpt()
    closed, copies = Closed(), 1 if devices == 1 else 2
    loader = token_loader(copies, place, steps=3)
    trainer = make_trainer(strategy, devices, [closed] if devices > 1 else [], use_distributed_sampler=False)
    [metrics] = trainer.test(module, loader, ckpt_path=path, verbose=False)
    predicted = trainer.predict(module, loader)
    return metrics["test_loss"], predicted, closed.counts, closed.own


def test_evaluations_without_fit_are_one_processs(tmp_path: Path):
    path = tmp_path / "one.ckpt"
    fit(gpt_case(max_steps=1).but(at_end=lambda trainer, module: trainer.save_checkpoint(path)), "auto", 1)
    loss, predicted, _, _ = evaluated(path, "auto", 1, 0)

    def run(rank: int, port: int) -> Any:
        join_as_torchrun(rank, 4, port)
        return evaluated(path, MESH.strategy(), 4, MESH.place(rank))

    ranks = run_ranks(run, 4, free_port(), group=False, timeout=50.0)
    mean = (ranks[0][0] + ranks[2][0]) / 2
    assert abs(mean - loss) < 2e-5
    for step, whole in enumerate(predicted):
        ours = torch.cat([ranks[rank][1][step] for rank in (0, 2)])
        assert torch.equal(ours, whole)
    for _, _, counts, own in ranks:
        assert max(counts) < 0.6 * own, "a half, padding, and a number behind each part"
