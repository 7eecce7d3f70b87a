"""Accumulating rescaled all of .grad in every step: the same batch twice gave 1.25 times its gradient, not 2."""

import torch
from torch import Tensor

from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity, on_stages


class Plain(Classifier):
    """Keeps the gradients that reach the optimizer."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        own = {n: p for n, p in self.named_parameters() if not isinstance(p, ForeignParameter)}
        self.grads = {n: p.grad.clone() for n, p in own.items() if p.grad is not None}


def grads(trainer: object, module: Plain) -> dict[str, Tensor]:
    return module.grads


def test_the_same_batch_twice_gives_the_gradient_of_one():
    once = Case(Plain, lambda: row_loader((8,)), trainer={"max_steps": 1}, validate=False, at_end=grads)
    twice = once.but(loader=lambda: repeated(2), trainer={"accumulate_grad_batches": 2})
    for one, two in zip(on_stages(once, 2), on_stages(twice, 2), strict=True):
        assert one.extra.keys() == two.extra.keys() and one.extra
        for name, gradient in one.extra.items():
            torch.testing.assert_close(two.extra[name], gradient)


def repeated(times: int) -> object:
    [batch] = row_loader((8,)).dataset
    return torch.utils.data.DataLoader([batch] * times, batch_size=None)


def test_accumulation_is_one_processs():
    assert_parity(Case(Classifier, lambda: repeated(4), trainer={"max_epochs": 2, "accumulate_grad_batches": 2}))
