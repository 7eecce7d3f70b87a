"""Checkpoints of runs with parameter servers: one version, and resumed anywhere; what optimizers may be."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from torch import nn

from lightning_parallel.parameter_server import Adagrad
from lightning_parallel.parameter_server.filters import Float16, RandomSkip, TopK
from lightning_parallel.strategies import ParameterServerStrategy, ZeROStrategy
from tests.trainer.modules import Classifier, chain, row_dataset, row_loader
from tests.trainer.pipelines import WEIGHTS, make_trainer
from tests.trainer.servers import (
    OPTIMIZERS,
    OWN_ROWS,
    RAGGED,
    Ends,
    Shares,
    assert_equal,
    ends,
    fit,
    slow,
    with_optimizer,
)

pytestmark = pytest.mark.timeout(60)

OTHER_CALLBACKS = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


def saving(folder):
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    return {"callbacks": [checkpoint], "enable_checkpointing": True}


@OTHER_CALLBACKS
@pytest.mark.parametrize(
    "resume", [("auto", 1, {}), ("ps", 3, {"num_servers": 2}), slow(("ps", 1, {"consistency": "ssp"}))], ids=str
)
def test_a_checkpoint_resumes_anywhere(tmp_path, resume):
    """In a plain Trainer, and with another number of workers and servers; the optimizer's state goes on."""
    kind, devices, options = resume
    through = fit("auto", max_epochs=4)[1]
    fit(ParameterServerStrategy(num_servers=1), 2, **saving(tmp_path))
    strategy = "auto" if kind == "auto" else ParameterServerStrategy(**options)
    trainer, module = fit(strategy, devices, max_epochs=4, checkpoint=tmp_path / "epoch=1.ckpt")
    assert ends(trainer)["step"] == 16
    assert_equal(module, through, **WEIGHTS)


@OTHER_CALLBACKS
def test_what_filters_left_behind_is_in_the_checkpoint(tmp_path):
    """A run that is resumed goes on as it would have."""
    make = lambda: ParameterServerStrategy(filters=[TopK(0.1), RandomSkip(0.5), Float16()], num_servers=2)  # noqa: E731
    through = fit(make(), 2, max_epochs=3, **saving(tmp_path))[1]
    trainer, module = fit(make(), 2, max_epochs=3, checkpoint=tmp_path / "epoch=0.ckpt")
    assert ends(trainer)["step"] == 12
    saved = torch.load(tmp_path / "epoch=0.ckpt")["parameter_server"]["left_behind"]
    assert len(saved) == 2 and any(tensor.any() for tensor in saved[1]["residual"][0])
    assert_equal(module, through)


@pytest.mark.slow
@OTHER_CALLBACKS
def test_a_plain_checkpoint_resumes_on_servers(tmp_path):
    make = with_optimizer(OPTIMIZERS["adam"])
    through = fit("auto", make=make, max_epochs=4)[1]
    fit("auto", make=make, **saving(tmp_path))
    module = fit(
        ParameterServerStrategy(num_servers=3, replication=2),
        2,
        make,
        max_epochs=4,
        checkpoint=tmp_path / "epoch=1.ckpt",
    )[1]
    assert_equal(module, through, **WEIGHTS)


def test_a_stale_run_saves_one_version(tmp_path):
    """What is saved is what every worker validated with."""
    module = fit(
        ParameterServerStrategy("ssp", 3, num_servers=2),
        3,
        **saving(tmp_path),
        train=row_dataset(60, 4),
        use_distributed_sampler=True,
    )[1]
    saved = torch.load(tmp_path / "epoch=1.ckpt")["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())


def test_early_stopping_stops_all_after_the_same_epoch():
    trainer = make_trainer(
        ParameterServerStrategy("async"),
        2,
        [Ends(), EarlyStopping("val_loss", min_delta=9.0, patience=1)],
        max_epochs=9,
        **OWN_ROWS,
    )
    trainer.fit(Shares(), val_dataloaders=row_loader((5,)))
    assert ends(trainer)["step"] == 6 and ends(trainer)["epoch"] == 2
    assert trainer.callback_metrics["steps"] == 20


def test_running_statistics_are_means_over_workers():
    make = lambda: Classifier(chain(3, lambda: nn.BatchNorm1d(6)))  # noqa: E731
    module = fit(
        ParameterServerStrategy("ssp"), 2, make, train=row_dataset(32, 8), use_distributed_sampler=True, max_epochs=1
    )[1]
    alone = [nn.BatchNorm1d(6) for _ in range(2)]
    first = module.net[1]
    assert first.num_batches_tracked == 2 and not torch.equal(first.running_mean, alone[0].running_mean)
    assert first.running_mean.isfinite().all()


def test_an_unknown_optimizer_is_refused_and_workers_can_run_it():
    make = with_optimizer(lambda module: torch.optim.RMSprop(module.parameters(), 0.01))
    with pytest.raises(
        ValueError, match=r"The servers know SGD, Adagrad, Adam, AdamW, and this is RMSprop\. Let each worker run it"
    ):
        fit(ParameterServerStrategy(), 2, make)
    assert_equal(fit(ParameterServerStrategy(update="worker"), 2, make)[1], fit("auto", make=make)[1], **WEIGHTS)


class FindsAgain(LearningRateFinder):
    """A finder at every milestone, as Lightning's documentation has it; where fit starts it runs too."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            assert self.optimal_lr is not None
            self.lr_find(trainer, module)


def test_weights_that_servers_hold_are_not_restored_within_a_run():
    finder = FindsAgain(num_training_steps=3, update_attr=False, early_stop_threshold=None)
    with pytest.raises(ValueError, match=r"cannot restore weights while it trains .* Restore before fit"):
        fit(ParameterServerStrategy(), 1, callbacks=[finder])
    finder = FindsAgain(num_training_steps=3, update_attr=False, early_stop_threshold=None)
    found = fit(ZeROStrategy(stage=1), 1, callbacks=[finder])[1]
    finder = FindsAgain(num_training_steps=3, update_attr=False, early_stop_threshold=None)
    assert_equal(found, fit("auto", 1, callbacks=[finder])[1], **WEIGHTS)


def test_what_a_scheduler_may_not_change_is_said():
    def cycling(module):
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    with pytest.raises(
        ValueError, match=r"told of learning rates alone. Schedule lr only \(OneCycleLR\(cycle_momentum=False\)\)"
    ):
        fit(ParameterServerStrategy(), 2, with_optimizer(cycling))


@pytest.mark.slow
def test_layers_that_are_frozen_in_the_run_are_refused_where_servers_step():
    class Freezes(Classifier):
        def on_train_epoch_start(self):
            self.net[12].requires_grad_(self.current_epoch == 0)

    with pytest.raises(ValueError, match="has 14 parameters that train of 16, and at first had 16 of 16"):
        fit(ParameterServerStrategy(), 2, Freezes)
    assert_equal(fit(ParameterServerStrategy(update="worker"), 2, Freezes)[1], fit("auto", make=Freezes)[1], **WEIGHTS)


def test_64_bits_are_refused():
    with pytest.raises(ValueError, match=r"got a parameter of torch.float64, but the servers hold float32"):
        fit(ParameterServerStrategy(), 1, precision="64-true")


@pytest.mark.slow
def test_downpour_with_an_update_of_its_own_and_filters_learns():
    strategy = ParameterServerStrategy(
        "downpour", update=Adagrad(0.02), n_push=2, n_fetch=3, filters=[TopK(0.5), Float16()]
    )
    shares = {
        "train": row_loader((8,) * 10),
        "validate": row_loader((8,) * 10),
        "max_epochs": 8,
        "num_sanity_val_steps": 2,
    }
    losses = ends(fit(strategy, 2, **shares)[0])["losses"]
    assert losses[-1] < losses[1]  # losses[0] is the sanity check's


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
@pytest.mark.parametrize(
    "make", [ParameterServerStrategy, partial(ZeROStrategy, stage=2, start_method="fork")], ids=["servers", "ZeRO"]
)
def test_the_process_that_forked_the_workers_saves_weights_and_says_so(make, tmp_path):
    trainer, module = fit(make(), 2)
    with pytest.warns(UserWarning, match="trainer.save_checkpoint writes weights alone"):
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt")
    assert (saved["global_step"], saved["epoch"]) == (2 * len(RAGGED), 2)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in saved["state_dict"].items())
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        fit("auto", checkpoint=tmp_path / "after.ckpt", max_epochs=3)
