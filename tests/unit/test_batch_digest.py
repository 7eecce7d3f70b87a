"""Ranks compare a hash of their batches: equal values are equal ones, whatever a batch is made of."""

import pytest
import torch

from lightning_parallel.pipeline.batch.digest import digest_of


class Note:
    """Shows where it lies in memory, as objects do by default."""


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, Note()),
        lambda x: torch.diag(x).to_sparse(),
        lambda x: torch.diag(x).to_sparse_csr(),
        lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
        lambda x: {"x": x, "names": ["a", "b"], "scale": torch.tensor(2.0)},
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_equal_batches_have_equal_hashes_and_others_have_not(make):
    assert digest_of(make(torch.tensor([1.0, 2.0]))) == digest_of(make(torch.tensor([1.0, 2.0])))
    assert digest_of(make(torch.tensor([1.0, 2.0]))) != digest_of(make(torch.tensor([1.0, 3.0])))
