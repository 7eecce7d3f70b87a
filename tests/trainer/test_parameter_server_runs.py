"""Scripts of several runs in which a worker is killed and others start it again: it passes over those that are over."""

import multiprocessing
import signal

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_parallel.errors import StageError
from lightning_parallel.parameter_server.trainer.coordination.external_coordinator import ExternalCoordinator
from lightning_parallel.parameter_server.trainer.coordination.later_runs import LaterRuns
from lightning_parallel.ports import ReservedPort
from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import row_loader
from tests.trainer.pipelines import WEIGHTS, join_as_torchrun, make_trainer
from tests.trainer.servers import slow
from tests.trainer.test_parameter_server_rows import (
    BATCH,
    KILLED,
    WORKERS,
    Marks,
    Numbered,
    first_epoch,
    reference,
    share,
    side_by_side,
    trained,
)  # fmt: skip

pytestmark = [pytest.mark.timeout(90), pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")]
fork = multiprocessing.get_context("fork")


class Script(Marks):
    """Two fits behind each other; rank 0 waits for the new worker where the second run has its first epoch's end."""

    def setup(self, stage):
        line = self.trainer.strategy._line
        if line is not None and line.is_new:
            self.there.set()

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        if self.global_rank == 0 and self.waits and self.current_epoch == 0:
            assert self.there.wait(80)


def script(rank, port, folder, dies_in, there, came_to):
    """What each worker's process runs: validate, fit, fit."""
    join_as_torchrun(rank, WORKERS, port)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = Script(folder / "0")
    module.there, module.waits = there, False
    trainers = []
    told = [maker().validate(module, row_loader((5,)), verbose=False)]
    for run, epochs in ((1, 1), (2, 2)):
        if rank == 0:
            came_to[run].set()
        module.folder, module.waits = folder / str(run), run == dies_in == 2
        module.killed = KILLED if run == dies_in else None
        trainer = maker(max_epochs=epochs)
        trainer.fit(module, DataLoader(Numbered(), BATCH, shuffle=True), row_loader((5,)))
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        told.append((weights, dict(trainer.callback_metrics), trainer.current_epoch, trainer.global_step))
        trainer.save_checkpoint(folder / f"{run}.ckpt")  # nobody else is in this run any more, if it was passed over
        trainers.append(trainer)
    trainers[0].save_checkpoint(folder / "first.ckpt")  # all meet at the last run's hub
    torch.save(told, folder / f"told.{rank}")


def maker(**options):
    strategy = ParameterServerStrategy("bsp", lease=40.0, restarts=1)
    return make_trainer(strategy, WORKERS, num_sanity_val_steps=0, **options)


@pytest.mark.parametrize("dies_in", [2, slow(1)])
def test_a_worker_that_is_started_again_passes_over_runs_that_are_over(dies_in, tmp_path):
    """It is killed in the second fit, and joins at its second epoch; or in the first, and begins the second with all.

    What earlier runs left on rank 0 (weights, metrics, counters, what validate returned) they have left in it too.
    """
    reserved, there, came_to = ReservedPort("127.0.0.1"), fork.Event(), {run: fork.Event() for run in (1, 2)}
    for run in (1, 2):
        (tmp_path / str(run)).mkdir()
    arguments = (reserved.number, tmp_path, dies_in, there, came_to)
    started = [fork.Process(target=script, args=(rank, *arguments)) for rank in (*range(WORKERS), KILLED)]
    for process in started[:WORKERS]:
        process.start()
    started[KILLED].join()
    assert started[KILLED].exitcode == -signal.SIGKILL
    assert came_to[2].wait(60)  # if it was killed in the first fit, that is over now
    started[-1].start()
    for process in started:
        process.join()
    reserved.close()
    assert [process.exitcode for process in started] == [0, -signal.SIGKILL, 0, 0]

    told = [torch.load(tmp_path / f"told.{rank}") for rank in range(WORKERS)]
    torch.testing.assert_close(told[KILLED][:2], told[0][:2], rtol=0.0, atol=0.0)  # in what it joins losses are its own
    own = [share(0, place) for place in range(WORKERS)]
    second_epoch = side_by_side(*(share(1, place) for place in range(WORKERS)))
    runs = [first_epoch(), side_by_side(*own)] if dies_in == 1 else [side_by_side(*own), first_epoch()]
    first = reference(runs[0])
    torch.testing.assert_close(told[0][1][0], first.state_dict(), **WEIGHTS)
    second = reference([*runs[1], *second_epoch], first)
    saved = [torch.load(tmp_path / f"{name}.ckpt")["state_dict"] for name in ("1", "2", "first")]
    torch.testing.assert_close(saved, [told[0][run][0] for run in (1, 2, 2)], rtol=0.0, atol=0.0)
    torch.testing.assert_close(told[0][2][0], second.state_dict(), **WEIGHTS)
    assert trained(tmp_path / "2", 1) == {place: share(1, place) for place in range(WORKERS)}


def first_worker(port, ends):
    hub = ExternalCoordinator(0, 1, port, run=2, restarts=1, past={})
    assert ends.wait(60)
    hub.close()


def test_nothing_that_was_not_kept_is_passed_over():
    """The first run had restarts=0."""
    reserved, ends = ReservedPort("127.0.0.1"), fork.Event()
    process = fork.Process(target=first_worker, args=(reserved.number, ends))
    process.start()
    with pytest.raises(StageError, match="Run 1 of the script is over, and nothing was kept of it"):
        LaterRuns(reserved.number, 1).await_past(30.0)
    with pytest.raises(TimeoutError, match=r"Run 2 of the script is over, and after 0\.0 s there is no later one"):
        LaterRuns(reserved.number, 2).await_past(0.0)
    ends.set()
    process.join()
    reserved.close()
    assert process.exitcode == 0
