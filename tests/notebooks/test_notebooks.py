"""Every notebook runs as it stands, in a kernel of its own, and shows the outputs of a run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs_of(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def pictures_in(outputs):
    return [output for output in outputs if "image/png" in output.get("data", {})]


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {"01_pipeline", "02_schedules", "03_zero", "04_ssp", "05_hybrid"}


@pytest.mark.timeout(110)  # half a minute where nothing else runs
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem < "02" else [pytest.mark.slow]) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_notebook_runs_as_it_stands(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # Jupyter warns where it has to guess its folders
    notebook = nbformat.read(path, as_version=4)
    stored = pictures_in(outputs_of(notebook))
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert len(pictures_in(outputs_of(notebook))) == len(stored) > 0
    assert not list(tmp_path.iterdir())  # it leaves nothing where it runs


@every_notebook
def test_notebook_is_stored_as_it_ran(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
