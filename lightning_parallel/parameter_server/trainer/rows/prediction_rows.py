"""Rows of predictions: dealt as those of evaluations are, so that those of a worker that dies are predicted by others.

The one idea: the predictions of a worker that dies are lost with it, so all of its share is predicted anew; what the
workers that are left have in the end is every row once. A worker's predictions are in the order in which it made them,
what it took over last, and Lightning tells writers which rows they are of. Left out: loaders whose order is not that of
the dataset, which each worker would draw for itself.
"""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_parallel.parameter_server.trainer.rows.dealt_rows import DealtSampler
from lightning_parallel.parameter_server.trainer.rows.evaluation_rows import EvaluationRows, EvaluationShares
from lightning_parallel.parameter_server.trainer.rows.row_deals import DealPart


class PredictionRows(EvaluationRows):
    """Sees to it that every row is predicted by a worker that is there at the end; see `EvaluationRows`."""

    def take(self, loader: object) -> None:
        """Divide a loader's rows among those who are there, if they are Lightning's to deal."""
        batches = getattr(loader, "batch_sampler", None)
        if not isinstance(batches, _IndexBatchSamplerWrapper) or type(batches._batch_sampler) is not BatchSampler:
            return
        sampler: Any = batches._batch_sampler.sampler
        members = self._line.present
        if not _is_in_order(sampler) or self._fewest(batches._batch_sampler, len(members)) < 1:
            return
        own = DealtSampler(sampler, lambda epoch: None)
        own.divide(DealPart(0, members, members.index(self._line.rank)))
        batches._batch_sampler.sampler = own
        batches.sampler = own  # type: ignore[attr-defined]
        self._shares[id(own)] = EvaluationShares(members)
        self._line.may_lose()

    def _fewest(self, batches: BatchSampler, workers: int) -> int | float:
        """The batches of the worker that has the fewest; shares differ by a row."""
        rows = len(cast(Any, batches.sampler).dataset) // workers
        return self._limited(-(-rows // batches.batch_size))

    def _extend(self, index: int, loader: DataLoader, batches: list[list[int]]) -> None:
        sampler: Any = loader.batch_sampler
        del sampler.seen_batch_indices[
            int(self._loop._combined_loader.limits[index]) :
        ]  # a loader's workers look ahead
        sampler.seen_batch_indices += batches
        super()._extend(index, loader, batches)

    @property
    def _loop(self) -> Any:
        return self._trainer.predict_loop

    @property
    def _limit(self) -> int | float:
        return self._trainer.limit_predict_batches


def _is_in_order(sampler: Any) -> bool:
    """Whether Lightning deals rows in the dataset's order, which is the same on every worker."""
    return (
        type(sampler) is UnrepeatedDistributedSamplerWrapper
        and not sampler.shuffle
        and type(cast(Any, sampler.dataset)._sampler) is SequentialSampler
    )
