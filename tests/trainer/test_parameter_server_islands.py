"""Islands of workers that step together, beside DistributedDataParallel and one process."""

import os
import signal
from datetime import timedelta

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_parallel.callbacks import StalenessMonitor
from lightning_parallel.errors import StageError
from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import Classifier, row_dataset, row_loader
from tests.trainer.pipelines import LOSS, WEIGHTS, make_trainer
from tests.trainer.servers import OWN_ROWS, Shares, assert_equal, slow
from tests.trainer.test_parameter_server import Dealt

pytestmark = pytest.mark.timeout(60)


def fit(strategy, devices, make=Classifier, **options):
    """Rows are dealt by Lightning."""
    torch.manual_seed(1)
    module = make()
    trainer = make_trainer(strategy, devices, max_epochs=2, gradient_clip_val=0.2, num_sanity_val_steps=0, **options)
    trainer.fit(module, row_dataset(48, 4), row_dataset(12, 4))
    return module, trainer


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
@pytest.mark.parametrize("update", ["server", slow("worker")])
def test_one_island_is_data_parallelism(update):
    """Bit for bit where servers step: half of each gradient and half of the other's, clipped once they are added."""
    theirs, _ = fit(DDPStrategy(start_method="fork", process_group_backend="gloo"), 2)
    ours, _ = fit(ParameterServerStrategy("ssp", 3, island_size=2, update=update), 2)
    assert_equal(ours, theirs, **({} if update == "server" else WEIGHTS))


@pytest.mark.parametrize("options", [{"consistency": "bsp"}, slow({"consistency": "bsp", "num_servers": 2})], ids=str)
def test_two_islands_are_one_process_on_all_rows(options):
    runs = []
    for strategy, count in (("auto", 1), (ParameterServerStrategy(**options, island_size=2), 4)):
        torch.manual_seed(1)
        module, trainer = Dealt(), make_trainer(strategy, count, max_epochs=2, **OWN_ROWS)
        trainer.fit(module)
        runs.append((module, trainer.callback_metrics))
    (plain, wanted), (ours, found) = runs
    assert_equal(ours, plain, **WEIGHTS)
    for key in ("val_loss", "accuracy", "loss_epoch"):
        torch.testing.assert_close(found[key], wanted[key], **LOSS)


class BatchMethod(Dealt):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def test_l_bfgs_of_an_island_is_that_of_one_process_on_all_rows():
    """Its line search evaluates the joined batch at the same points on both members, who decide by one loss."""
    runs = []
    for strategy, count in (("auto", 1), (ParameterServerStrategy(island_size=2, update="worker"), 2)):
        torch.manual_seed(1)
        module, trainer = BatchMethod(), make_trainer(strategy, count, max_epochs=1, **OWN_ROWS)
        trainer.fit(module)
        runs.append((module, trainer.callback_metrics))
    (plain, wanted), (ours, found) = runs
    assert_equal(ours, plain, rtol=1e-3, atol=1e-4)  # a step multiplies what rounding is between sums of gradients
    torch.testing.assert_close(found["val_loss"], wanted["val_loss"], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_staleness_is_bounded_between_islands():
    monitor = StalenessMonitor()
    torch.manual_seed(1)
    trainer = make_trainer(
        ParameterServerStrategy("ssp", 2, island_size=2), 4, [monitor], max_epochs=3, num_sanity_val_steps=0
    )
    trainer.fit(Classifier(), row_dataset(160, 4), row_loader((5,)))
    assert sorted(monitor.reading.workers) == [0, 2]
    assert sum(monitor.reading.all.ages.values()) == 2 * 30
    assert max(monitor.reading.all.gaps) <= 2 and max(monitor.reading.all.ages) <= monitor.reading.version_bound == 5


class Loses(Shares):
    """One rank is killed in its third step."""

    killed = 3

    def training_step(self, batch, batch_idx):
        if self.global_rank == self.killed and self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class LosesFirst(Loses):
    killed = 1


@pytest.mark.slow
def test_a_member_that_dies_takes_its_island_along(caplog):
    trainer = make_trainer(ParameterServerStrategy("ssp", island_size=2, lease=40.0), 4, max_epochs=2, **OWN_ROWS)
    trainer.fit(Loses((5, 5, 5, 5)), val_dataloaders=row_loader((5,)))
    assert trainer.callback_metrics["steps"] == 20
    assert "Worker 3 is gone (SIGKILL" in caplog.text and "Worker 2 is gone (" in caplog.text


@pytest.mark.slow
def test_the_run_ends_with_the_island_of_rank_zero():
    with pytest.raises(
        StageError, match=r"lost rank 1: its process ended|a member of this island of 2 workers is gone"
    ):
        make_trainer(ParameterServerStrategy("ssp", island_size=2), 4, max_epochs=2, **OWN_ROWS).fit(
            LosesFirst((5, 5, 5, 5)), val_dataloaders=row_loader((5,))
        )


@pytest.mark.parametrize("lengths", [(3, 7), slow((7, 3))])
def test_a_member_with_fewer_batches_is_found(lengths, monkeypatch):
    """One is in a step, for which it needs the other, which is at the end of its epoch."""
    monkeypatch.setattr("lightning_parallel.parameter_server.worker.island.SAY_EVERY", timedelta(seconds=0.5))
    monkeypatch.setattr("lightning_parallel.parameter_server.trainer.coordination.rendezvous.SURE_S", 0.3)
    with pytest.raises(StageError, match=r"Members of an island wait, but not for the same: rank . is in a step"):
        make_trainer(ParameterServerStrategy("ssp", island_size=2), 2, max_epochs=1, **OWN_ROWS).fit(
            Shares(lengths), val_dataloaders=row_loader((5,))
        )


def test_islands_have_to_be_whole():
    with pytest.raises(ValueError, match=r"\(island_size=2\) got 3 devices, which are no whole number of islands"):
        make_trainer(ParameterServerStrategy(island_size=2), 3, max_epochs=1).fit(
            Classifier(), row_loader(), row_loader()
        )
    with pytest.raises(ValueError, match="an island ends when a member dies, and none begins in a run"):
        ParameterServerStrategy(island_size=2, restarts=1)
