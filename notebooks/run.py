"""Run notebooks and store their outputs: ``python notebooks/run.py``, or one: ``python notebooks/run.py 02_schedules``.

A stored notebook says in its metadata what it was run with: its own cells, the colours of pictures, and the random
numbers that this version of torch draws on this processor. ``tests/notebooks`` says when a notebook is older than they
are, and compares numbers where the random numbers are the same. Cells with the tag ``timed`` print numbers that no two
runs share.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import torch
from nbclient import NotebookClient
from torch import nn

from lightning_parallel.measure import palette

FOLDER = Path(__file__).parent
TIMEOUT = 300  # seconds a cell


def code_cells(notebook: Any) -> list[Any]:
    """Those that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def version(notebook: Any) -> str:
    """Of all that its outputs follow from, except the library's code."""
    sources = [cell.source for cell in code_cells(notebook)]
    return hashlib.sha256(repr([sources, palette.version()]).encode()).hexdigest()[:16]


def drawn() -> str:
    """The random numbers that layers begin with here; versions of torch and kinds of processors have others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        numbers = [torch.randperm(1000).float(), nn.init.trunc_normal_(torch.empty(99)), nn.Embedding(256, 64).weight]
    rounded = [tensor.detach().round(decimals=4).tolist() for tensor in numbers]
    return hashlib.sha256(repr(rounded).encode()).hexdigest()[:16]


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells in a kernel of their own, which imports the package that lies beside the notebooks."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")  # Jupyter warns where it has to guess its folders
    options = {"timeout": TIMEOUT, "kernel_name": "python3", "record_timing": False}
    NotebookClient(notebook, resources={"metadata": {"path": folder}}, **options).execute()


def main(names: list[str]) -> None:
    """Run those that are named, or all, and write them back."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            notebook = nbformat.read(path, as_version=4)
            with tempfile.TemporaryDirectory() as folder:
                execute(notebook, Path(folder))
            notebook.metadata["language_info"] = {"name": "python"}  # not which version it was
            notebook.metadata["lightning_parallel"] = {"version": version(notebook), "drawn": drawn()}
            for number, cell in enumerate(notebook.cells):
                cell["id"] = f"cell-{number}"
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
