"""Recomputation: the same bits as without it, random numbers and running statistics included, in less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.trainer.modules import CLASSES, WIDTH, Classifier, chain, row_loader, token_loader
from tests.trainer.pipelines import Case, Record, failure_of, many_on_stages, on_stages
from tests.trainer.test_parity import gpt

SIZES = (8, 8, 12)


def normed() -> nn.Sequential:
    """Blocks that normalise, drop, and write into what they made themselves."""
    block = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
    )
    return nn.Sequential(*(block() for _ in range(4)), nn.Linear(WIDTH, CLASSES))


CASES = {
    "normed": Case(lambda: Classifier(normed()), lambda: row_loader(SIZES), trainer={"max_epochs": 2}),
    "one micro-batch": Case(
        lambda: Classifier(normed()), lambda: row_loader(SIZES), {"num_microbatches": 1}, {"max_epochs": 2}
    ),
    "gpt": Case(gpt, token_loader, trainer={"max_epochs": 2}),
}


def assert_same_bits(ours: Record, theirs: Record) -> None:
    assert torch.equal(torch.stack(ours.losses), torch.stack(theirs.losses))
    assert ours.weights.keys() == theirs.weights.keys()
    for name, value in theirs.weights.items():
        # A single micro-batch's running statistics are PyTorch's own, or ours where it runs twice: other sums.
        close = {"rtol": 1e-6, "atol": 1e-7} if "running" in name else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(ours.weights[name], value, **close, msg=name)


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_recomputed_is_not_recomputed_bit_by_bit(name: str, num_stages: int):
    case = CASES[name]
    cases = [case.but({"recompute": recompute}) for recompute in ("none", "block", "stage")]
    none, block, stage = many_on_stages(cases, num_stages)
    assert_same_bits(block[0], none[0])
    assert_same_bits(stage[0], none[0])


def writing(last: nn.Module) -> Classifier:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.3, inplace=True))]
    return Classifier(nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), last, nn.Linear(WIDTH, CLASSES)))


def test_a_stage_that_writes_into_what_came_in():
    # The second and the third stage begin with the activation.
    case = Case(lambda: writing(nn.Tanh()), row_loader, {"partition": [1, 2, 3, 3]})
    none, stage = many_on_stages([case, case.but({"recompute": "stage"})], 4)
    assert_same_bits(stage[0], none[0])


def test_a_block_that_writes_into_its_argument_is_refused():
    case = Case(lambda: writing(nn.LeakyReLU(0.3, inplace=True)), row_loader, {"recompute": "block"})
    message = failure_of(case)
    assert "Block `net.1` writes into its arguments, so the backward cannot compute it again from them." in message


class Counts(Classifier):
    """Counts how many outputs of its layers are alive when one is made in a later step, and how often layers run."""

    def __init__(self) -> None:
        block = lambda: nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.Tanh())))  # noqa: E731
        super().__init__(nn.Sequential(*(block() for _ in range(7)), chain(1)))
        self.made: list[StorageWeakRef] = []
        self.calls = self.most = 0
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Tanh)):
                layer.register_forward_hook(self.note)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls = self.most = 0

    def note(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        if self.training:
            self.calls += 1
            self.made = [made for made in self.made if not made.expired()]
            self.made.append(StorageWeakRef(output.untyped_storage()))
            self.most = max(self.most, len(self.made))


def test_less_is_kept_and_more_computed():
    def counts(trainer: Any, module: Counts) -> tuple[int, int]:
        return module.most, module.calls

    case = Case(
        Counts,
        lambda: row_loader([8] * 3),
        {"schedule": "gpipe", "num_microbatches": 8, "partition": [4, 4], "check_loss": False},
        validate=False,
        at_end=counts,
    )
    runs = many_on_stages([case.but({"recompute": recompute}) for recompute in ("none", "block", "stage")], 2)
    (kept, calls), (kept_by_block, calls_by_block), (kept_by_stage, calls_by_stage) = [run[1].extra for run in runs]
    layers, blocks, microbatches = 6 * 4, 4, 8  # an activation keeps its output, a linear layer its input
    on_its_way = 2 * microbatches + 2  # sent in this step or the one before; what a layer is just making
    assert layers * microbatches <= kept <= layers * microbatches + on_its_way
    assert kept_by_block <= blocks * microbatches + layers // blocks + on_its_way
    assert kept_by_stage <= layers + on_its_way
    assert calls == 2 * layers * microbatches
    assert calls_by_stage == 2 * calls
    assert calls_by_block == 2 * calls - blocks * microbatches  # stops when what was kept is there: in the last layer


def test_a_word_that_is_no_recomputation_is_refused():
    with pytest.raises(ValueError, match=r'recompute=True\): recompute is "none", "block" or "stage"'):
        on_stages(Case(Classifier, row_loader, {"recompute": True}), 1)
