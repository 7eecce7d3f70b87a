"""The embedding and the head shared a weight on different stages, and the copies drifted apart."""

import pytest
import torch

from lightning_parallel.demo import GPT
from tests.trainer.modules import token_loader
from tests.trainer.pipelines import Case, assert_same, many_on_stages, one_process
from tests.trainer.test_parity import KEY_BIAS


class AdamGPT(GPT):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_copies_are_the_same_bits_and_one_processs(num_stages: int):
    case = Case(
        lambda: AdamGPT(11, 16, 16, num_heads=2),
        token_loader,
        trainer={"max_epochs": 2, "max_steps": 5, "gradient_clip_val": 1.0},
    )
    [records] = many_on_stages([case], num_stages)
    first, last = records[-1].own["embedding.weight"], records[0].own["embedding.weight"]
    assert torch.equal(first, last)
    assert torch.equal(records[0].weights["head.weight"], records[0].weights["embedding.weight"])
    assert_same(records, one_process(case), leave_out=KEY_BIAS)
