"""A killed worker's rows are finished by others, and a new worker joins: beside one process that follows the rule."""

import copy
import multiprocessing
import os
import signal
from collections import Counter

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel.ports import ReservedPort
from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import Classifier, row_loader, rows
from tests.trainer.pipelines import WEIGHTS, make_trainer
from tests.trainer.servers import assert_equal, slow

pytestmark = pytest.mark.timeout(60)
WORKERS, ROWS, BATCH = 3, 60, 4  # five batches each
KILLED, AT = 1, 2  # it has pushed two


class Numbered(Dataset):
    """Rows that say which they are."""

    def __init__(self):
        self.x, self.y = rows([ROWS])[0]

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


class Marks(Classifier):
    """Notes in a file which rows it has pushed; one worker is killed, once."""

    killed = KILLED

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def loss(self, batch):
        return super().loss(batch[:2])

    def training_step(self, batch, batch_idx):
        first = self.folder / "killed"
        if self.global_rank == self.killed and batch_idx == AT and not first.exists():
            first.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.batch = batch
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with open(self.folder / f"{self.current_epoch}.{self.global_rank}", "a") as file:
            file.write(" ".join(map(str, batch[2].tolist())) + "\n")

    def on_train_epoch_end(self):
        if self.trainer.limit_val_batches:
            self.log("steps", float(self.trainer.global_step), sync_dist=True, reduce_fx="sum")


def trained(folder, epoch):
    """What each worker pushed in an epoch: its batches of row numbers."""
    files = sorted(folder.glob(f"{epoch}.*"))
    return {int(f.suffix[1:]): [[int(n) for n in line.split()] for line in f.read_text().splitlines()] for f in files}


def share(epoch, place, workers=WORKERS):
    sampler = DistributedSampler(range(ROWS), workers, place, shuffle=True, seed=0)
    sampler.set_epoch(epoch)
    return list(BatchSampler(sampler, BATCH, False))


def run(folder, consistency, epochs=2, meets=True, workers=0, make=Marks, devices=WORKERS, **options):
    torch.manual_seed(1)
    module = make(folder)
    strategy = ParameterServerStrategy(consistency, lease=40.0, **options)
    limits = {"num_sanity_val_steps": 0} if meets else {"limit_val_batches": 0}
    trainer = make_trainer(strategy, devices, max_epochs=epochs, **limits)
    loader = DataLoader(Numbered(), BATCH, shuffle=True, num_workers=workers)
    trainer.fit(module, loader, row_loader((5,)))
    return module, trainer


def reference(clocks, module=None):
    """One process: in each clock, the mean of the gradients of so many batches. It begins with a module, or anew."""
    torch.manual_seed(1)
    module, data = copy.deepcopy(module) if module is not None else Classifier(), Numbered()
    optimizer = module.configure_optimizers()
    for batches in clocks:
        optimizer.zero_grad()
        (sum(module.loss((data.x[batch], data.y[batch])) for batch in batches) / len(batches)).backward()
        optimizer.step()
    return module


def side_by_side(*shares):
    """The batches of each clock, of workers that step together."""
    return [list(batches) for batches in zip(*shares, strict=True)]


def first_epoch():
    """Three workers for two clocks, then two; the third's last three batches are dealt to them, two each."""
    own = [share(0, place) for place in range(WORKERS)]
    left = own[KILLED][AT:]
    return [
        *side_by_side(*(batches[:AT] for batches in own)),
        *side_by_side(own[0][AT:], own[2][AT:]),
        *side_by_side([left[0], left[2]], [left[1], left[0]]),
    ]


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_a_killed_workers_rows_are_dealt_to_the_others(workers, tmp_path, caplog):
    module, trainer = run(tmp_path, "bsp", workers=workers)
    second = side_by_side(*(share(1, place, 2) for place in range(2)))
    assert_equal(module, reference([*first_epoch(), *second]), **WEIGHTS)
    assert trainer.callback_metrics["steps"] == 2 * (5 + 2 + 8)
    assert "Worker 1 is gone (SIGKILL" in caplog.text and "the rows that are its share are dealt to them" in caplog.text


def test_a_new_worker_takes_the_place_of_a_killed_one(tmp_path):
    """It has its share of the next epoch, and all step together with it."""
    module, _ = run(tmp_path, "bsp", restarts=1)
    second = side_by_side(*(share(1, place) for place in range(WORKERS)))
    assert_equal(module, reference([*first_epoch(), *second]), **WEIGHTS)
    assert trained(tmp_path, 1) == {place: share(1, place) for place in range(WORKERS)}


class Awaits(Marks):
    """Rank 0 goes on to the second epoch once the new worker is there."""

    there = multiprocessing.get_context("fork").Event()

    def setup(self, stage):
        if self.trainer.strategy._line.is_new:
            self.there.set()

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        if self.global_rank == 0:
            assert self.there.wait(50)


def as_rank(rank, port, folder, restarts):
    """What a process does that somebody else has started, as torchrun does."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORKERS), "LOCAL_WORLD_SIZE": str(WORKERS),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "one",
    }  # fmt: skip
    torch.set_num_threads(1)
    module, _ = run(folder, "bsp", restarts=restarts, make=Awaits)
    if rank == 0:
        torch.save(module.state_dict(), folder / "weights.pt")


def test_a_new_worker_is_taken_in_where_others_start_it(tmp_path):
    """The second of three is killed; a process that is started with its rank joins at the second epoch's start."""
    reserved, context = ReservedPort("127.0.0.1"), multiprocessing.get_context("fork")
    started = [
        context.Process(target=as_rank, args=(rank, reserved.number, tmp_path, 1)) for rank in (*range(WORKERS), KILLED)
    ]
    for process in started[:WORKERS]:
        process.start()
    started[KILLED].join()
    assert started[KILLED].exitcode == -signal.SIGKILL
    started[-1].start()
    for process in started:
        process.join()
    reserved.close()
    assert [process.exitcode for process in started] == [0, -signal.SIGKILL, 0, 0]
    second = side_by_side(*(share(1, place) for place in range(WORKERS)))
    weights = reference([*first_epoch(), *second]).state_dict()
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), weights, **WEIGHTS)
    assert trained(tmp_path, 1) == {place: share(1, place) for place in range(WORKERS)}


@pytest.mark.parametrize("consistency", ["ssp", slow("async"), slow("downpour")])
@pytest.mark.parametrize("meets", [slow(True), False])
def test_every_row_is_trained_on_and_those_acknowledged_once(consistency, meets, tmp_path):
    """Where nobody waits at an epoch's end, too: what is late is done in a later one, at last at the end of all."""
    options = {"n_push": 2, "n_fetch": 2} if consistency == "downpour" else {}
    run(tmp_path, consistency, 3, meets, restarts=1, **options)
    epochs = [trained(tmp_path, epoch) for epoch in range(3)]
    assert epochs[0][KILLED] == share(0, KILLED)[:AT]
    batches = [batch for epoch in epochs for of in epoch.values() for batch in of]
    assert all(batches.count(acknowledged) == 1 for acknowledged in epochs[0][KILLED])
    counts = Counter(row for batch in batches for row in batch)
    assert counts.keys() == set(range(ROWS)) and min(counts.values()) >= 3
    if meets:
        assert epochs[2] == {place: share(2, place) for place in range(WORKERS)}


class KillsTheFourth(Marks):
    killed = 3


@pytest.mark.parametrize("meets", [True, slow(False)])
def test_rows_of_an_island_that_died_are_dealt_to_those_of_another(meets, tmp_path, caplog):
    """Each of its two members leaves two batches, and each of the other's gets one of them."""
    module, _ = run(tmp_path, "bsp", 2, meets, make=KillsTheFourth, devices=4, island_size=2)
    own = [share(0, place, 4) for place in range(4)]
    together, alone = side_by_side(*(batches[:AT] for batches in own)), side_by_side(own[0][AT:], own[1][AT:])
    left = [batches[AT:] for batches in own[2:]]
    second = side_by_side(*(share(1, place, 2) for place in range(2)))
    clocks = [*together, *alone, *left, *second]
    if meets:
        assert_equal(module, reference(clocks), **WEIGHTS)
    counts = Counter(tuple(batch) for epoch in range(2) for of in trained(tmp_path, epoch).values() for batch in of)
    assert counts == Counter(tuple(batch) for clock in clocks for batch in clock)
    assert "the rows that are its share are dealt to them" in caplog.text


class StopsAlone(Marks):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.trainer.should_stop = self.global_rank == 2 and batch_idx == 1


@pytest.mark.slow
def test_a_worker_that_stops_by_itself_holds_nobody_up(tmp_path):
    """The others do not wait for rows of the dead with it, which waits for the evaluation already."""
    (tmp_path / "killed").touch()
    _, trainer = run(tmp_path, "ssp", 1, make=StopsAlone)
    assert trainer.callback_metrics["steps"] == 5 + 5 + 2


def test_new_workers_need_rows_that_are_dealt():
    strategy = ParameterServerStrategy("ssp", restarts=1)
    with pytest.raises(ValueError, match="new workers join where rows are dealt to them"):
        make_trainer(strategy, 2, max_epochs=1, use_distributed_sampler=False).fit(
            Classifier(), row_loader(), row_loader((5,))
        )
    with pytest.raises(ValueError, match="starts workers again, but here others start them"):
        make_trainer(ParameterServerStrategy(restarts=1, start_method="popen"), 2)
