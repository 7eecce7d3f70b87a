"""The store of a run: a process that was forked never speaks on a connection of its parent's."""

import os

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_parallel import mesh
from lightning_parallel.strategies import ZeROStrategy
from tests.harness import free_port
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import make_trainer


class Stores(Callback):
    """Notes the process and the port of every store that the rank's process knows."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.rank_zero = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rank_zero = os.getpid()
        self.seen = [(process, port) for process, _, port in mesh._stores]

    def state_dict(self) -> dict:
        return {"seen": self.seen, "rank_zero": self.rank_zero}

    def load_state_dict(self, state: dict) -> None:
        self.seen, self.rank_zero = state["seen"], state["rank_zero"]


def fit(devices: int) -> Stores:
    stores = Stores()
    strategy = ZeROStrategy(stage=1, start_method="fork")
    make_trainer(strategy, devices=devices, max_steps=1, callbacks=[stores]).fit(
        Classifier(), row_loader((4, 4)), row_loader((4,))
    )
    return stores


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
@pytest.mark.parametrize("named", [False, True], ids=["any port", "the parent's port"])
def test_forked_ranks_have_a_store_of_their_own(named: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if named:
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
    before = dict(os.environ)
    alone = fit(1)
    here = [port for process, port in alone.seen if process == os.getpid()]
    assert here
    assert os.environ.get("MASTER_PORT") == before.get("MASTER_PORT")
    forked = fit(2)
    [theirs] = [port for process, port in forked.seen if process == forked.rank_zero]
    assert forked.rank_zero != os.getpid()
    assert theirs not in here
    assert os.environ.get("MASTER_PORT") == before.get("MASTER_PORT")
