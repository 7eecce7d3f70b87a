"""Forms of a strategy in YAML were refused without a word of what would be right."""

from pathlib import Path

import pytest

from lightning_parallel import cli

RUN = """
model: {{class_path: DigitsClassifier}}
data: {{class_path: DigitsDataModule}}
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy: {strategy}
"""


def answer(capsys: pytest.CaptureFixture, folder: Path, strategy: str, command: str = "--print_config") -> tuple:
    """Exit status, output and errors of `fit` with a strategy written so."""
    config = folder / "run.yaml"
    config.write_text(RUN.format(strategy=strategy))
    try:
        status = cli.main(["fit", "--config", str(config), command])
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


def test_a_list_is_answered_with_the_form_that_is_taken(capsys, tmp_path):
    status, _, said = answer(capsys, tmp_path, "[{class_path: PipelineStrategy}]")
    assert status == 2
    assert "class_path: PipelineStrategy" in said and "list" in said


@pytest.mark.parametrize("form", ["PipelineStrategy", "lightning_parallel.strategies.PipelineStrategy"])
def test_a_bare_class_is_taken(capsys, tmp_path, form):
    status, printed, _ = answer(capsys, tmp_path, form)
    assert status in (0, None)
    assert "class_path: lightning_parallel." in printed and "num_microbatches:" in printed


@pytest.mark.parametrize("form", ["PipelineStrategie", "{class_path: PipelineStrategie}", "pipeline_1f1bb"])
def test_a_typo_is_answered_with_our_names(capsys, tmp_path, form):
    status, _, said = answer(capsys, tmp_path, form)
    assert status == 2
    assert ("pipeline_1f1b" if "1f1b" in form else "PipelineStrategy") in said.replace(form.strip("{}"), "")
