"""Workers of one host that step together and are one worker to the servers: DDP within an island, staleness between.

    island 0: rank 0 <--average--> rank 1        island 1: rank 2 <--average--> rank 3
                | push, pull                                 | push, pull
                '------------------- servers ----------------'

The one idea: gradients are averaged by one all-reduce, the first member alone talks to servers, and what it reads goes
to the others by one broadcast. The group is not torch's default one, so that nobody takes it for all ranks. Left out:
a member that dies takes its island along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.parameter_server.table import refuse_sparse
from lightning_parallel.parameter_server.worker.reading import Result

SAY_EVERY = timedelta(seconds=5)


class IslandLostError(RuntimeError):
    """A member of this worker's island is gone, and the others cannot go on without it."""


class Island:
    """The group of an island's members.

    Args:
        path: a file that they share and nobody else uses.
        place: of this worker among them.
        size: how many they are.
        device: where gradients are.
        timeout: how long a member may be waited for.
        stuck: told the number of a wait for the others while it takes long; not where gradients are on GPUs.
    """

    def __init__(
        self,
        path: str,
        place: int,
        size: int,
        device: torch.device,
        timeout: timedelta,
        stuck: Callable[[int], None] = lambda wait: None,
    ) -> None:
        self.place, self.size, self._stuck, self._waits = place, size, stuck, 0
        store = dist.FileStore(path, size)
        with self._together():
            self._host: Any = dist.ProcessGroupGloo(dist.PrefixStore("host", store), place, size, timeout)
            self._device: Any = self._host
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._device = dist.ProcessGroupNCCL(dist.PrefixStore("device", store), place, size, options)
            self._device.allreduce([torch.zeros(1, device=device)]).wait()  # the store is needed no more

    @property
    def leads(self) -> bool:
        """Whether this is the member that talks to servers."""
        return self.place == 0

    @torch.no_grad()
    def average(self, parameters: Sequence[Tensor], loss: Tensor) -> Tensor:
        """Set every gradient to its mean over members; one that no member has stays None.

        Args:
            parameters: with this member's gradients.
            loss: this member's, of one element.

        Returns:
            The mean loss: an optimizer that decides by it (L-BFGS) has to decide alike on all members.

        Raises:
            ValueError: a gradient is sparse.
        """
        for parameter in parameters:
            if parameter.grad is not None:
                refuse_sparse(parameter.grad)
        own = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        flags = own.to(parameters[0].device)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        summands = (part.detach().to(flags).reshape(-1) / self.size for part in (loss, *parts))
        flat = torch.cat([flags, *summands])
        with self._together():
            self._end(self._device.allreduce([flat]))
        there, mean_loss, *means = flat.split([len(parameters), 1, *(part.numel() for part in parts)])
        for parameter, has, average in zip(parameters, there.tolist(), means, strict=True):
            if has and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            if has and parameter.grad is not None:
                parameter.grad.copy_(average.view_as(parameter))
        return mean_loss.reshape(loss.shape)

    def meet(self) -> None:
        """Wait for all members."""
        with self._together():
            self._host.allreduce([torch.zeros(1)]).wait()

    def tell(self, vector: Tensor) -> Tensor:
        """Give all members the first one's vector, on the host."""
        with self._together():
            self._end(self._host.broadcast(vector, 0))
        return vector

    def _end(self, work: Any) -> None:
        """Wait for what members do together; the host's waits are told of, since a member may be elsewhere."""
        self._waits += 1
        while self._device is self._host and not work.is_completed():
            try:
                work.wait(SAY_EVERY)
            except RuntimeError:
                if not work.is_completed():
                    self._stuck(self._waits)
        work.wait()

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise IslandLostError(f"a member of this island of {self.size} workers is gone ({error})") from error


@dataclass
class Follower:
    """What a member that does not talk to servers has in place of a session, and of the client in it.

    Args:
        island: whose first member reads for all.
        size: elements of the vector.
    """

    island: Island
    size: int
    memory: Callable[[int], Tensor] = torch.empty
    clock: int = 0
    seq: int = 0
    worker: int | None = None
    filters: None = None
    lost: bool = field(default=False)

    @property
    def client(self) -> Follower:
        """Itself."""
        return self

    def pull(self) -> Result:
        """What the first member reads."""
        return Result(self.island.tell(self.memory(self.size)), 0, {}, self.clock, (), ())

    def push(self, vector: Tensor | None, tick: bool = True, lr: float | None = None, copy: bool = True) -> None:
        """Nothing: the first member does."""
        self.seq, self.clock = self.seq + 1, self.clock + 1

    def await_replicas(self) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
