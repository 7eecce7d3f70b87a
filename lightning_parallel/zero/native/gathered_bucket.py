"""A bucket whose parameters are whole only while they are needed: stage 3 on flat buckets.

The one idea: the memory of the whole bucket comes and goes, the tensors that autograd has saved of it stay what they
are. A rank keeps its part; `open` gives the bucket memory and begins to gather all parts into it, `close` takes the
memory away. Before all have arrived and while it is closed, parameters have their shape and dtype, and reading or
writing them raises (see `zero/closed_parameters.py`).

Source: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5.3; that saved tensors outlive the memory is as PyTorch's
FullyShardedDataParallel does it (Zhao et al., arXiv 2304.11277, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_parallel.zero.closed_parameters import KeptPart, close, lose, put_data, reopen
from lightning_parallel.zero.collectives import Traffic, all_gather_parts
from lightning_parallel.zero.native.bucket import Bucket


class GatheredBucket(Bucket):
    """Parameters of one dtype, of which this rank keeps its part. It begins open, and the arguments are a `Bucket`'s.

    Attributes:
        is_open: whether the parameters have memory; `arrive` says when they are whole.
        names: of the parameters, for messages.
        watchers: called with the bytes that any bucket of this process takes, or gives back (below 0).
    """

    watchers: ClassVar[list[Callable[[int], None]]] = []

    is_open = True
    names: Sequence[str] = ()
    _gathering: Any = None
    _kept: Sequence[KeptPart] = ()

    def _own_part(self) -> Tensor:
        """The part in memory of its own, and behind it the number that closed parameters read."""
        part = self._part_of(self.flat)
        own = torch.cat([part, part.new_full((1,), float("nan"))])
        self._closed = own[len(part) :]
        return own[: len(part)]

    def _keep(self, index: int, name: str) -> KeptPart:
        (at, k), (begin, end) = self.places[index], self.layout.piece(index, self.ranks.rank)
        wide = self.updated[at : at + k] if self.has_copy else None
        return KeptPart(name, self.own[at : at + k], begin, end, self.ranks.group, wide)

    def open(self, traffic: Traffic) -> None:
        """Begin to gather, if that is to be done."""
        if self.is_open:
            return
        self.is_open = True
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self._tell(self.flat.nbytes)
        for parameter, view in zip(self.parameters, self._split(self.flat), strict=True):
            put_data(parameter, view)
        self._gathering = all_gather_parts(self.flat, self.own, self.ranks.group, traffic)

    def arrive(self) -> None:
        """The parameters are whole from now on."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            for parameter in self.parameters:
                reopen(parameter)

    def name_of(self, parameter: Tensor) -> str:
        """A parameter's name, for messages."""
        return next((n for n, own in zip(self.names, self.parameters, strict=True) if own is parameter), "?")

    def close(self) -> None:
        """Free the whole parameters; nobody else is asked."""
        if self.is_open:
            self.arrive()
            self._rebind_all()
            self.own.copy_(self._part_of(self.flat))  # what was written to the whole parameters stays
            self.is_open = False
            self._closed.fill_(float("nan"))
            place = self._closed.storage_offset()
            self._kept = self._kept or [self._keep(i, name) for i, name in enumerate(self.names)]
            for parameter, kept in zip(self.parameters, self._kept, strict=True):
                parameter.data = self._closed.as_strided(parameter.shape, [0] * parameter.dim(), place)
                close(parameter, kept)
            self.flat.untyped_storage().resize_(0)
            self._tell(-self.flat.nbytes)

    def _tell(self, nbytes: int) -> None:
        for watcher in self.watchers:
            watcher(nbytes)

    def gather(self, traffic: Traffic) -> Any:
        """After an update: whole parameters are brought up to date, closed ones when they are opened."""
        if self.has_copy:
            self.own.copy_(self.updated)
        return all_gather_parts(self.flat, self.own, self.ranks.group, traffic) if self.is_open else None

    @property
    def is_whole(self) -> bool:
        """Whether the parameters have their values; a gather that a failure has cut short never brings them."""
        return self.is_open and self._gathering is None

    def take_over(self) -> None:
        if self.is_whole:
            super().take_over()
        else:
            self._take_over_part()

    def _take_over_part(self) -> None:
        if self.is_whole:
            self.own.copy_(self._part_of(self.flat))
        super()._take_over_part()

    def release(self, failed: bool = False) -> None:
        """After a failure a rank that shares parameters has a part of them: reading them goes on to raise.

        Raises:
            AssertionError: the bucket is closed, and nothing has failed.
        """
        assert failed or self.is_open
        if self.is_whole:
            super().release(failed)
            return
        for name, parameter in zip(self.names, self.parameters, strict=True):
            lose(parameter, name, parameter.shape)

    def refresh(self) -> None:
        """The whole parameters were written to: take over this rank's part."""
        assert self.is_open, "a closed bucket cannot be written to"
        self.own.copy_(self._part_of(self.flat))
        super().refresh()
