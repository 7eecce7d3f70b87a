"""Going from evaluation to training and back broke the pipeline."""

import torch
from lightning.pytorch import Trainer

from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import Case, all_metrics, assert_parity, many_on_stages, one_process


class Predicts(Classifier):
    def test_step(self, batch: tuple, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: tuple, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


def test_validation_amid_training_with_other_batch_sizes():
    options = {"val_check_interval": 2, "max_epochs": 2, "num_sanity_val_steps": 2}
    assert_parity(
        Case(Predicts, lambda: row_loader((8,) * 5), trainer=options, validation=lambda: row_loader((3, 5, 1)))
    )


def every_function(trainer: Trainer, module: Predicts) -> list:
    results = [
        trainer.validate(module, row_loader((6, 2)), verbose=False),
        trainer.test(module, row_loader((7,)), verbose=False),
    ]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, row_loader((4, 8)), row_loader((5,)))
    results += [all_metrics(trainer), trainer.predict(module, row_loader((5, 1)))]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, row_loader((4, 8)), row_loader((5,)))
    return [*results, all_metrics(trainer)]


def test_fit_validate_test_fit_predict_fit():
    case = Case(Predicts, row_loader, trainer={"max_epochs": 1}, after=every_function)
    reference = one_process(case).extra
    for num_stages in (2, 4):
        [records] = many_on_stages([case], num_stages)
        torch.testing.assert_close(records[0].extra, reference, rtol=2e-5, atol=2e-6)
        for other in records[1:]:
            other.extra[3] = records[0].extra[3]  # predictions exist where the last stage is
            torch.testing.assert_close(other.extra, records[0].extra, rtol=0, atol=0)
