"""What the copies of a stage do together along the data axis: equal values at the start, the mean of gradients.

The one idea: a copy of the model is a pipeline of its own. The ranks that hold the same stage in different copies see
different rows, so their gradients are averaged, once a step of the optimizer: here, where their sums did not begin
while backwards ran (``gradient_sums.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.pipeline.gradients.buckets import BucketSum, buckets
from lightning_parallel.pipeline.transport.axis_line import AxisLine


class DataAxis(AxisLine):
    """The ranks that hold one stage in every copy of the model, copy by copy."""

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average `grad` over the copies, in place; where only some copies have one, the others count as zero.

        Args:
            parameters: this rank's, those that train.

        Raises:
            ValueError: a gradient is sparse; another copy has come to a pause.
        """
        if self.size == 1:
            return
        with self.waiting("the other copies of the model, to average gradients"):
            somewhere, _ = self.agree_on_gradients([parameter.grad is not None for parameter in parameters])
            for parameter, count in zip(parameters, somewhere, strict=True):
                if count and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            sums = self._sum([parameter for parameter in parameters if parameter.grad is not None])
            for parameter, total in sums.items():
                torch.div(total, self.size, out=parameter.grad)

    def add_up(self, sums: Tensor) -> None:
        """Sum a tensor over the copies, in place."""
        with self.waiting("the other copies of the model, to add up what batch norms saw"):
            dist.all_reduce(sums, group=self.group)

    def agree_on_gradients(self, made: Sequence[bool], stale: bool = False) -> tuple[list[int], bool]:
        """How many copies have a gradient for each parameter, and whether some copy's sums are stale.

        Raises:
            ValueError: another copy has come to a pause.
        """
        *somewhere, is_stale = self._agree([*made, stale], False)
        return somewhere, is_stale > 0

    def _sum(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            raise ValueError("A gradient is sparse, which the data axis does not average. Use sparse=False.")
        sent = [BucketSum(bucket, self.group) for bucket in buckets(gradients)]
        return dict(zip(parameters, (total for bucket in sent for total in bucket.wait()), strict=True))

    def pause(self, parameters: Sequence[nn.Parameter]) -> None:
        """Where an epoch or an evaluation begins or training ends: all copies have to be there.

        Raises:
            ValueError: another copy still has batches to train on.
        """
        if self.size > 1:
            with self.waiting("the other copies of the model, at the end of an epoch"):
                self._agree([False] * (len(parameters) + 1), True)

    def _agree(self, said: list[bool], pausing: bool) -> list[int]:
        """On the host: how many copies say yes to each question, and that all or none of them pause."""
        votes = torch.tensor([*said, pausing], dtype=torch.int32)
        dist.all_reduce(votes, group=self.group)
        *counts, ended = votes.tolist()
        if 0 < ended < self.size:
            raise ValueError(
                f"{ended} of {self.size} copies of the model have come to the end of their training batches, the others"
                " have more. All copies need as many: use a map-style dataset (Lightning deals its rows evenly),"
                " limit_train_batches=, or an iterable that gives every copy the same number of batches."
            )
        return counts
