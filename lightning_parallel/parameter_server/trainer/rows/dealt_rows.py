"""A worker's rows: its share of every epoch as the hub deals it, and at its end what dead workers left.

The one idea: Lightning's sampler has shares for so many workers; here the number is asked for at every epoch's start,
and what a dead worker left becomes further batches of the epoch. Where all workers meet at an epoch's end anyway (an
evaluation, the last one), the end of all rows is waited for; elsewhere what comes too late is trained on at the end of
the next epoch. Left out: who has which rows (``row_deals.py``), loaders that deal for themselves.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel.parameter_server.trainer.coordination.run_coordinator_client import ROWS, RunCoordinatorClient
from lightning_parallel.parameter_server.trainer.rows.row_deals import DealPart

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class DealtSampler(Sampler[int]):
    """Lightning's sampler, which tells when an epoch begins."""

    def __init__(self, sampler: DistributedSampler, begins: Callable[[int], None]) -> None:
        self.sampler, self._begins = sampler, begins

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning when an epoch begins."""
        self.sampler.set_epoch(epoch)
        self._begins(epoch)

    def divide(self, part: DealPart) -> None:
        """Have the share that a part is of."""
        vars(self.sampler).update(vars(share_of(self.sampler, part)))

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def share_of(sampler: DistributedSampler, part: DealPart) -> DistributedSampler:
    """The sampler of the share that a part is of."""
    share, kind = copy.copy(sampler), DistributedSampler
    if isinstance(sampler, UnrepeatedDistributedSampler):
        kind = UnrepeatedDistributedSampler
    kind.__init__(
        share, sampler.dataset, len(part.members), part.place, sampler.shuffle, sampler.seed, sampler.drop_last
    )
    share.set_epoch(part.epoch)
    return share


def loader_of(loader: DataLoader, batches: list[list[int]]) -> DataLoader:
    """A loader of other batches, given by their rows."""
    other = copy.copy(loader)
    object.__setattr__(other, "_iterator", None)
    object.__setattr__(other, "batch_sampler", batches)
    return other


class DealtRows:
    """Sees to it that a worker trains on what the hub deals it.

    Args:
        trainer: whose training loader Lightning has given a sampler.
        line: to the hub.
        meet: waits for all workers, see ``RunCoordinatorClient.meet``.
        welcome: lets in new workers, together with all others; returns the epoch that begins.
        together: whether steps are of all workers together, so that no epoch may end for one alone.
    """

    def __init__(
        self,
        trainer: Trainer,
        line: RunCoordinatorClient,
        meet: Callable[[str], dict[int, Any]],
        welcome: Callable[[], int],
        together: bool = False,
    ) -> None:
        self._together = together
        self._trainer, self._line, self._meet, self._welcome = trainer, line, meet, welcome
        self._loader: DataLoader | None = None
        self._lengths: list[int] = []  # of the parts of this epoch
        self._begun = 0  # parts of epochs before it
        self.turn = 0  # how often epochs were begun from an earlier one on, as behind a search for a learning rate
        self._last = -1  # the epoch that was begun last

    def take(self, loader: object) -> None:
        """Look after a training loader, if its rows are Lightning's to deal."""
        batches = getattr(loader, "batch_sampler", None)
        sampler = getattr(batches, "sampler", None)
        if isinstance(sampler, DealtSampler):
            sampler = sampler.sampler
        if type(batches) is not BatchSampler or type(sampler) is not DistributedSampler:
            return
        assert isinstance(loader, DataLoader)
        batches.sampler = DealtSampler(sampler, self._begin)
        self._loader = loader

    @property
    def are_dealt(self) -> bool:
        """Whether the hub deals them: one loader, with Lightning's sampler, and evaluations at ends of epochs only."""
        trainer, combined = self._trainer, self._trainer.fit_loop._combined_loader
        interval = trainer.val_check_interval
        whole = isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch is not None
        alone = combined is not None and combined.flattened == [self._loader]
        return self._loader is not None and alone and (whole or not trainer.enable_validation)

    def note(self, number: int, seq: int) -> None:
        """Before a push: tell the hub up to which batch this worker will have come with it."""
        if (come_to := self.come_to()) is not None:
            self._line.note(number, seq, *come_to)

    def come_to(self) -> tuple[int, int] | None:
        """The part that the batch in hand is of, and how many of the part were begun with it; None if none is dealt."""
        if not self._lengths:
            return None
        part, batches = 0, self._progress.current.ready
        while part + 1 < len(self._lengths) and batches > self._lengths[part]:
            batches -= self._lengths[part]
            part += 1
        return self._begun + part, batches

    def after_step(self) -> None:
        """At the end of the share, take what dead workers left."""
        while self._lengths and self._progress.current.ready == self._trainer.num_training_batches:
            parts, again = self._more()
            batches = [self._batches_of(part) for part in parts]
            self._lengths += map(len, batches)
            self._extend(list(itertools.chain(*batches)))
            if not again:
                return

    # -- the hub's word ------------------------------------------------------------------------------------------------

    def _begin(self, epoch: int) -> None:
        self._begun += len(self._lengths)
        self._lengths = []
        if not self.are_dealt:
            return
        self.turn += epoch <= self._last
        part = None if self._line.is_new else self._line.deal(epoch, self.turn)
        while part is None:  # somebody new is let in first
            epoch = self._welcome()
            part = self._line.deal(epoch, self.turn)
        self._last = epoch
        assert self._loader is not None and self._loader.batch_sampler is not None
        sampler = self._loader.batch_sampler.sampler  # type: ignore[attr-defined]
        before = (sampler.sampler.num_replicas, sampler.sampler.rank)
        sampler.divide(part)
        self._resize(len(self._batches_of(part)))
        self._lengths = [self._trainer.fit_loop.max_batches]  # type: ignore[list-item]
        if before != (sampler.sampler.num_replicas, sampler.sampler.rank):
            iter(self._trainer.fit_loop._data_fetcher or ())

    def _more(self) -> tuple[list[DealPart], bool]:
        """What is this worker's now, and whether anybody has rows that are to be waited for."""
        if not self._all_meet:
            return self._line.more(), False
        everyone = self._meet(ROWS)
        return everyone[self._line.rank], any(everyone.values())

    @property
    def _all_meet(self) -> bool:
        """Whether all workers wait for each other at this epoch's end."""
        loop = self._trainer.fit_loop
        assert loop._data_fetcher is not None and loop.max_epochs is not None
        last = 0 <= loop.max_epochs <= self._trainer.current_epoch + 1
        return (
            last
            or self._together
            or (self._trainer.enable_validation and loop.epoch_loop._should_check_val_fx(loop._data_fetcher))
        )

    # -- Lightning's loops ---------------------------------------------------------------------------------------------

    @property
    def _progress(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress

    def _batches_of(self, part: DealPart) -> list[list[int]]:
        """The rows of a part."""
        assert self._loader is not None
        own: Any = self._loader.batch_sampler
        share = list(BatchSampler(share_of(own.sampler.sampler, part), own.batch_size, own.drop_last))
        limit = _parse_num_batches(RunningStage.TRAINING, len(share), self._trainer.limit_train_batches)
        return part.of(share[: int(min(limit, len(share)))])

    def _resize(self, batches: int) -> None:
        """Tell Lightning how many batches the epoch has."""
        trainer = self._trainer
        trainer.fit_loop.max_batches = batches
        assert trainer.fit_loop._combined_loader is not None
        trainer.fit_loop._combined_loader.limits = [batches]
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, batches)

    def _extend(self, batches: list[list[int]]) -> None:
        """Have Lightning go on with more batches in this epoch."""
        if not batches:
            return
        loop = self._trainer.fit_loop
        fetcher, combined = loop._data_fetcher, loop._combined_loader
        assert fetcher is not None and combined is not None and combined._iterator is not None
        self._resize(int(loop.max_batches) + len(batches))
        fetcher.length, fetcher.done = int(loop.max_batches), False
        self._progress.is_last_batch = False
        assert self._loader is not None
        combined._iterator.iterators[0] = iter(loader_of(self._loader, batches))
