"""Each stage clipped its gradients by its own norm."""

import pytest
import torch
from torch import Tensor

from lightning_parallel.demo import GPT
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from tests.trainer.modules import token_loader
from tests.trainer.pipelines import LOSS, WEIGHTS, Case, assert_same, failure_of, many_on_stages, one_process


class Clipped(GPT):
    """Notes the gradients that reach the optimizer after clipping."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: object, optimizer_closure: object) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        own = {n: p for n, p in self.named_parameters() if not isinstance(p, ForeignParameter)}
        self.clipped = {n: p.grad.clone() for n, p in own.items() if p.grad is not None}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def clipped(trainer: object, module: Clipped) -> dict[str, Tensor]:
    return module.clipped


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_the_norm_is_the_whole_models_with_tied_weights_counted_once(num_stages: int, tied: bool):
    options = {"gradient_clip_val": 0.1}
    case = Case(
        lambda: Clipped(11, 16, 16, num_heads=2, tie_embeddings=tied),
        token_loader,
        trainer=options,
        at_end=clipped,
        validate=False,
    )
    [records] = many_on_stages([case], num_stages)
    reference = one_process(case)
    assert_same(records, reference, LOSS, WEIGHTS)
    together: dict[str, Tensor] = {}
    for record in records:
        for name, gradient in record.extra.items():
            assert name not in together or torch.equal(together[name], gradient), "copies are clipped alike"
            together[name] = gradient
    assert together.keys() == reference.extra.keys()
    norm = torch.stack([gradient.norm() for gradient in together.values()]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.1), rtol=1e-4, atol=0.0)


def test_clipping_by_value():
    options = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    case = Case(lambda: Clipped(11, 16, 16, num_heads=2), token_loader, trainer=options, at_end=clipped, validate=False)
    [records] = many_on_stages([case], 2)
    assert_same(records, one_process(case))
    assert all(float(g.abs().max()) <= 0.002 + 1e-9 for record in records for g in record.extra.values())


class OwnClipping(GPT):
    """Clips by the norm of all gradients it sees, as one does in one process."""

    def configure_gradient_clipping(self, optimizer: object, *args: object, **kwargs: object) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def test_clipping_of_ones_own_is_refused_where_it_would_see_one_stage_only():
    case = Case(lambda: OwnClipping(11, 16, 16, num_heads=2), token_loader)
    error = failure_of(case, 2)
    assert "reads the gradient of parameter" in str(error)
    assert "Clip with self.clip_gradients(...) or Trainer(gradient_clip_val=...)" in str(error)
