"""What tests of parameter servers under a Trainer share: a run, what rank 0 saw of it, shares of rows."""

import pytest
import torch
from lightning.pytorch import Callback

from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import make_trainer

RAGGED = (8, 5, 8, 3)
OWN_ROWS = {"use_distributed_sampler": False}


def slow(*values):
    """A set of parameters that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


class Ends(Callback):
    """What rank 0 saw, brought to the process that started it."""

    def __init__(self):
        self.state = {"losses": []}

    def on_validation_epoch_end(self, trainer, module):
        self.state["losses"].append(float(trainer.callback_metrics["val_loss"]))

    def on_train_end(self, trainer, module):
        self.state |= {"step": trainer.global_step, "epoch": trainer.current_epoch}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def fit(strategy, devices=1, make=Classifier, train=None, validate=None, callbacks=(), checkpoint=None, **options):
    """A run in this process, or started from it; rows are the same for all workers unless told otherwise."""
    torch.manual_seed(1)
    module = make()
    options = {"max_epochs": 2, "use_distributed_sampler": False, **options}
    trainer = make_trainer(strategy, devices, [Ends(), *callbacks], **options)
    trainer.fit(module, train or row_loader(RAGGED), validate or row_loader((5, 8)), ckpt_path=checkpoint)
    return trainer, module


def ends(trainer):
    return next(callback.state for callback in trainer.callbacks if isinstance(callback, Ends))


def assert_equal(ours, theirs, **tolerance):
    tolerance = tolerance or {"rtol": 0.0, "atol": 0.0}
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(
            ours.state_dict()[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def with_optimizer(make_optimizer):
    class Optimized(Classifier):
        def configure_optimizers(self):
            return make_optimizer(self)

    return Optimized


def scheduled(module):
    groups = [{"params": module.net[:4].parameters(), "lr": 0.05}, {"params": module.net[4:].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


OPTIMIZERS = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda module: torch.optim.Adam(module.parameters(), 0.01),
    "adagrad": lambda module: torch.optim.Adagrad(module.parameters(), 0.1),
    "adamw": scheduled,
}


class Shares(Classifier):
    """Every worker has a loader of its own, of another length."""

    def __init__(self, lengths=(3, 7)):
        super().__init__()
        self.lengths = lengths

    def train_dataloader(self):
        return row_loader((4,) * self.lengths[self.global_rank], seed=self.global_rank)

    def on_train_epoch_end(self):
        counts = self.all_gather(torch.tensor(self.trainer.global_step))
        self.log("steps", counts.sum().float())
