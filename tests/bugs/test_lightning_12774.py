"""A notebook refused the strategy and did not say what to use instead."""

import lightning.pytorch.trainer.connectors.accelerator_connector as connector
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_parallel.strategies import PipelineStrategy


def test_the_fork_launcher_works_in_a_notebook(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connector, "_IS_INTERACTIVE", True)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy(start_method="fork"), logger=False)
    assert trainer.strategy.launcher.is_interactive_compatible


def test_the_other_launchers_are_refused_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connector, "_IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match=r"not compatible with an interactive environment"):
        Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy(), logger=False)
