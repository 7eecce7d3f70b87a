"""Rows of evaluations: a share for each worker that is there, and those of a worker that dies meanwhile for the others.

The one idea: what a worker has found is lost with it, so all of its share is evaluated anew, and each row counts once.
All meet at the end of a loader's rows, before anything is computed over workers; whoever is missing there has its share
dealt among the others, and all meet again behind that. Everybody knows the shares, so nobody has to be asked. The hub
is told who has found what would be lost with it from there on. Left out: loaders that deal for themselves, predictions
(``prediction_rows.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import _Sequential
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel.parameter_server.trainer.coordination.run_coordinator_client import RunCoordinatorClient
from lightning_parallel.parameter_server.trainer.rows.dealt_rows import DealtSampler, loader_of, share_of
from lightning_parallel.parameter_server.trainer.rows.row_deals import DealPart

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Share = tuple[int, tuple[tuple[int, int], ...]]  # place among members; (part, parts) of it, one after the other


class EvaluationShares:
    """Who evaluates what of a loader.

    Args:
        members: ranks among whom it is dealt.

    Example:
        >>> shares = EvaluationShares((0, 1, 2))
        >>> shares.lost({0, 2}), shares.given[2]
        (True, [(2, ()), (1, ((1, 2),))])
        >>> shares.lost({0, 2})
        False
    """

    def __init__(self, members: Collection[int]) -> None:
        self.members = tuple(sorted(members))
        self.given: dict[int, list[Share]] = {rank: [(place, ())] for place, rank in enumerate(self.members)}

    def lost(self, present: Collection[int]) -> bool:
        """Deal what those had who are not there any more; whether that is anybody."""
        gone, heirs = sorted(self.given.keys() - present), sorted(self.given.keys() & present)
        for place, cuts in [share for rank in gone for share in self.given.pop(rank)]:
            for part, heir in enumerate(heirs):
                self.given[heir].append((place, (*cuts, (part, len(heirs)))))
        return bool(gone)


class EvaluationRows:
    """Sees to it that all rows of evaluations count, each once.

    Args:
        trainer: whose loaders Lightning has given samplers.
        line: to the hub.
        meet: waits for all workers, see ``RunCoordinatorClient.meet``.
    """

    def __init__(self, trainer: Trainer, line: RunCoordinatorClient, meet: Callable[[str], dict[int, Any]]) -> None:
        self._trainer, self._line, self._meet = trainer, line, meet
        self._shares: dict[int, EvaluationShares] = {}  # by the sampler's id

    def take(self, loader: object) -> None:
        """Look after a loader, if its rows are Lightning's to deal."""
        batches = getattr(loader, "batch_sampler", None)
        sampler = getattr(batches, "sampler", None)
        if type(batches) is not BatchSampler or type(sampler) is not DistributedSampler:
            return
        own = DealtSampler(sampler, lambda epoch: self._begin(own, epoch))
        batches.sampler = own
        self._shares[id(own)] = EvaluationShares(self._line.present)
        if self._trainer.state.fn != TrainerFn.FITTING:
            self._line.may_lose()

    def _begin(self, own: DealtSampler, epoch: int) -> None:
        """An evaluation begins: divide the rows among those who are there."""
        shares = self._shares[id(own)] = EvaluationShares(self._meet("the rows of an evaluation"))
        own.divide(DealPart(epoch, shares.members, shares.members.index(self._line.rank)))
        loop = self._loop
        loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
        for index, loader in enumerate(loaders):
            if self._sampler_of(loader) is own:  # in a fit, where Lightning has counted its batches before
                loop._max_batches[index] = self._limited(len(loader))

    def after_step(self) -> None:
        """At the end of a loader's rows, take those of workers that are gone."""
        combined: Any = self._loop._combined_loader
        iterator = combined._iterator
        if not isinstance(iterator, _Sequential) or iterator.limits is None:
            return
        index = iterator._iterator_idx
        if index == len(combined.flattened):
            return  # a loader without a length, of which a batch is read ahead, has been read to its end
        loader = combined.flattened[index]
        shares = self._shares.get(id(self._sampler_of(loader)))
        if shares is None or iterator._idx < iterator.limits[index]:
            return
        own = shares.given[self._line.rank]
        known = len(own)
        while shares.lost(self._meet("the end of the rows of an evaluation")):
            batches = [batch for share in own[known:] for batch in self._batches_of(loader, shares, share)]
            known = len(own)
            if batches:
                self._extend(index, loader, batches)
                return
        self._line.found(True)

    def ended(self) -> None:
        """The evaluation is over, and what was found is with all."""
        if self._shares:
            self._line.found(False)

    @property
    def _loop(self) -> Any:
        return self._trainer._evaluation_loop

    @property
    def _limit(self) -> int | float:
        return self._trainer.limit_test_batches if self._trainer.testing else self._trainer.limit_val_batches

    def _batches_of(self, loader: Any, shares: EvaluationShares, share: Share) -> list[list[int]]:
        """The rows of a share, by batch."""
        batches, (place, cuts) = loader.batch_sampler, share
        sampler = batches.sampler.sampler
        rows = share_of(sampler, DealPart(sampler.epoch, shares.members, place))
        found = list(BatchSampler(rows, batches.batch_size, batches.drop_last))
        found = found[: int(self._limited(len(found)))]
        for part, parts in cuts:
            found = found[part::parts]
        return found

    def _extend(self, index: int, loader: DataLoader, batches: list[list[int]]) -> None:
        """Have Lightning go on with more batches of a loader."""
        loop = self._loop
        fetcher, combined = loop._data_fetcher, loop._combined_loader
        assert fetcher is not None and combined is not None and combined._iterator is not None
        assert combined.limits is not None and fetcher.length is not None
        limits = list(combined.limits)
        limits[index] += len(batches)
        combined.limits = combined._iterator.limits = limits
        fetcher.length, fetcher.done = fetcher.length + len(batches), False
        loop.batch_progress.is_last_batch = False
        combined._iterator.iterators[0] = iter(loader_of(loader, batches))

    def _sampler_of(self, loader: object) -> object:
        return getattr(getattr(loader, "batch_sampler", None), "sampler", None)

    def _limited(self, batches: int) -> int | float:
        stage = self._trainer.state.stage
        assert stage is not None
        return _parse_num_batches(stage, batches, self._limit)
