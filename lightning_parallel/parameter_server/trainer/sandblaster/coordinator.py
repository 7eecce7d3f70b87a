"""Rank 0's part in steps that all workers make together (Sandblaster): torch's L-BFGS on vectors of the servers.

The one idea: it runs in a thread beside rank 0's portions, and only numbers come to it. Left out: portions
(``batch_worker.py``), what a step is (``served_lbfgs.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.parameter_server.layout import Layout
from lightning_parallel.parameter_server.messages import Copy
from lightning_parallel.parameter_server.sandblaster.served_lbfgs import ServedLBFGS, Space
from lightning_parallel.parameter_server.table import Table
from lightning_parallel.parameter_server.transport.errands import Coordination


@dataclass(frozen=True)
class Clipping:
    """How the gradient of all rows is clipped, as `torch.nn.utils` clips that of one process.

    Args:
        limit: `Trainer(gradient_clip_val=)`; None or 0 clips nothing.
        algorithm: "norm" scales it so that its 2-norm is at most the limit, "value" limits every element's magnitude.

    Example:
        >>> from lightning_parallel.parameter_server.sandblaster.lbfgs import LocalShards
        >>> shards = LocalShards([torch.zeros(1), torch.zeros(1)])
        >>> shards.vectors[0]["g"], shards.vectors[1]["g"] = torch.tensor([3.0]), torch.tensor([-4.0])
        >>> Clipping(2.5).clip(Space(shards))
        >>> [round(float(one["g"]), 4) for one in shards.vectors]
        [1.5, -2.0]
    """

    limit: float | None = None
    algorithm: str = "norm"

    def clip(self, space: Space) -> None:
        """Clip the vector ``g`` on the ranges."""
        if not self.limit or self.limit < 0:
            return
        if self.algorithm == "value":
            space.call("clamp", "g", self.limit)
            return
        share = self.limit / (sqrt(space.call("dot", "g", "g")) + 1e-6)
        if share < 1:
            space.call("scale", "g", share)


class SandblasterCoordinator:
    """Has the servers make the steps of rank 0's optimizer, in a thread beside rank 0's portions.

    Args:
        coordination: of the job, started.
        optimizer: the user's.
        table: of its parameters.
    """

    def __init__(self, coordination: Coordination, optimizer: torch.optim.LBFGS, table: Table) -> None:
        self.coordination, self._table = coordination, table
        self._parameters = optimizer.param_groups[0]["params"]
        self._shards = coordination.shards
        self._space = Space(self._shards)
        self._served = ServedLBFGS(optimizer, self._space, self._pack)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def last_batch(self) -> int:
        """The last batch of portions, which is over between steps."""
        batch = self.coordination.caller.batch
        return 0 if batch is None else batch.batch

    def begin(self, portions: int, clipping: Clipping) -> None:
        """Begin a step over so many portions."""
        arguments = (portions, clipping)
        self._error, self._thread = None, threading.Thread(target=self._step, args=arguments, daemon=True)
        self._thread.start()

    def _step(self, portions: int, clipping: Clipping) -> None:
        try:
            self._served.step(lambda: self._evaluate(portions, clipping))
            self._space.call("store")
        except BaseException as error:
            self._error = error

    def _evaluate(self, portions: int, clipping: Clipping) -> float:
        """The loss, and the gradient on the servers: clipped as the closure of one process leaves it."""
        loss = self._shards.share(portions)
        clipping.clip(self._space)
        return loss

    @property
    def is_done(self) -> bool:
        """Whether the step is over.

        Raises:
            Exception: what ended it.
        """
        assert self._thread is not None
        if not self._thread.is_alive() and self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def state(self, copies: Mapping[int, Copy]) -> dict[int, Any]:
        """What the optimizer's state would be in one process, by the first parameter's number."""
        layout: Layout = self._table.layout
        state = self._served.saved(
            lambda name: self._unpack(layout.join({k: c.tensors[f"vector.{name}"] for k, c in copies.items()}))
        )
        return {0: state} if state else {}

    def _pack(self, flat: Tensor) -> Tensor:
        """Of all parameters' elements those that train, packed."""
        pieces = flat.split([parameter.numel() for parameter in self._parameters])
        trained = [piece for piece, p in zip(pieces, self._parameters, strict=True) if p.requires_grad]
        return self._table.pack([[one.view(shape) for one, shape in zip(trained, self._table.shapes[0], strict=True)]])

    def _unpack(self, vector: Tensor) -> Tensor:
        """All parameters' elements, zeros for those that do not train."""
        found = iter(self._table.unpack(vector)[0])
        pieces = [next(found) if p.requires_grad else torch.zeros(p.shape) for p in self._parameters]
        return torch.cat([piece.reshape(-1).to(torch.float32) for piece in pieces])

    def close(self, failed: bool) -> None:
        """Leave the job."""
        if failed:
            self.coordination.caller.lost = True
        if self._thread is not None:
            self._thread.join()
        self.coordination.close()
