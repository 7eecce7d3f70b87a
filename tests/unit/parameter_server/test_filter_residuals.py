"""What filters left behind, taken up by other workers with other servers."""

import pytest
import torch

from lightning_parallel.parameter_server.filters import Filters, TopK
from lightning_parallel.parameter_server.table import Table
from lightning_parallel.parameter_server.trainer.filter_residuals import left_behind, take_up

GROUPS = [[torch.zeros(5), torch.zeros(2, 2)], [torch.zeros(3)]]


def pushed(table: Table, gradient: torch.Tensor) -> Filters:
    filters = Filters([TopK(0.25)])
    for key, part in enumerate(table.layout.split(gradient)):
        filters.encode(key, part)
    return filters


@pytest.mark.parametrize("scale", ["mean", "sum"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_is_still_to_be_added_stays_the_same(workers, scale):
    before, after = Table.of(GROUPS, 3), Table.of(GROUPS, 1)
    gradients = [[[torch.randn_like(one) for one in group] for group in GROUPS] for _ in range(2)]
    old = [pushed(before, before.pack(gradient)) for gradient in gradients]
    saved = [left_behind(filters, before) for filters in old]
    new = [Filters([TopK(0.25)]) for _ in range(workers)]
    for rank, filters in enumerate(new):
        take_up(filters, after, saved, rank, workers, scale)
    left = torch.stack([after.pack(one["residual"]) for one in saved])
    found = torch.stack([filters.residual[0] for filters in new])
    assert left.abs().sum() > 0
    reduced = (left.mean(0), found.mean(0)) if scale == "mean" else (left.sum(0), found.sum(0))
    torch.testing.assert_close(*reduced)
    if workers == 2:
        assert torch.equal(found, left)
