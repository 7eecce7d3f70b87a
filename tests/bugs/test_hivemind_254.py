"""Forking after the parent had used OpenMP hung."""

import torch

from lightning_parallel.parameter_server import BSP, SGD, Layout, Rules
from lightning_parallel.parameter_server.launcher import launch
from lightning_parallel.strategies import ParameterServerStrategy
from tests.ranks.test_server_processes import SIZE, run_descent
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import make_trainer


def test_tensor_work_in_the_parent_then_two_forked_workers():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (torch.randn(600, 600) @ torch.randn(600, 600)).sum()
        with launch(Rules(Layout(SIZE, 2), SGD(0.1), BSP()), 1, 2) as started:
            found = run_descent(started.job, 3, 2)
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_tensor_work_in_the_parent_then_fit_on_two_forked_workers():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (torch.randn(600, 600) @ torch.randn(600, 600)).sum()
        trainer = make_trainer(ParameterServerStrategy("ssp"), 2, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(Classifier(), row_loader(), row_loader((5,)))
    finally:
        torch.set_num_threads(threads)
    assert trainer.callback_metrics["val_loss"].isfinite()
