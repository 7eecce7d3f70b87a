"""What ranks agree on once a round, on the host: who has which gradient, and that all of them are in the same round.

The one idea: one small sum over the ranks answers all questions at once, and none of them waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist


def some_end(is_last: bool, group: Any, waiting: Callable[[str], AbstractContextManager[Any]]) -> bool:
    """Whether some ranks, and not all, have come to their last batch. Collective."""
    ends = torch.tensor(int(is_last))
    with waiting("the other ranks, to evaluate a batch"):
        dist.all_reduce(ends, group=group)
    return 0 < int(ends) < dist.get_world_size(group)


def agree_on_round(
    made: list[list[bool]], late: bool, pausing: bool, rounds: int, group: Any
) -> tuple[list[list[bool]], int]:
    """For each parameter whether any rank has a gradient, and how many ranks have more to reduce. Collective.

    Args:
        made: which gradients this rank has.
        late: whether it has more to reduce.
        pausing: whether it has come to where an epoch or an evaluation begins.
        rounds: backwards that it has reduced so far.
        group: for host tensors, of all ranks that see different rows.

    Raises:
        RuntimeError: a rank has reduced more backwards than another.
        ValueError: some ranks have come to a pause, and others have not.
    """
    flags = [has for bucket in made for has in bucket]
    votes = torch.tensor([*flags, late, pausing, rounds], dtype=torch.int64)
    dist.all_reduce(votes, group=group)
    *counts, late_ranks, ended, all_rounds = votes.tolist()
    ranks = dist.get_world_size(group)
    if all_rounds != rounds * ranks:
        raise RuntimeError(
            f"This rank has reduced the gradients of {rounds} backwards, on average the {ranks} ranks have"
            f" {all_rounds / ranks:g}: a rank has left out a backward. To skip a batch on some ranks, return 0 * its"
            " loss there."
        )
    if 0 < ended < ranks:
        raise ValueError(
            f"{ended} of {ranks} ranks have come to the end of their training batches,"
            " the others have more. All need as many: use a map-style dataset (Lightning deals its rows evenly),"
            " limit_train_batches=, or an iterable that gives every rank the same number of batches."
        )
    answers = iter(counts)
    return [[next(answers) > 0 for _ in bucket] for bucket in made], late_ranks
