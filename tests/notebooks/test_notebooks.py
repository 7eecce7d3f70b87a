"""Every notebook runs as it stands, in a kernel of its own, and shows the outputs of a run of today's code.

`make test` imports what each of them imports and runs its first cell; `make test-notebooks` runs them whole.
"""

import ast
import base64
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from lightning_parallel.measure import palette

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
# matplotlib's own: "tab:blue" and the others, then the letters' "b", "g", "r" and so on.
FOREIGN = [
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
    "#0000ff",
    "#008000",
    "#ff0000",
    "#00bfbf",
    "#bf00bf",
    "#bfbf00",
]
OURS = {
    palette.PAPER,
    palette.INK,
    palette.MUTED,
    palette.IDLE,
    *(shade for shades in palette.ACTIONS.values() for shade in shades),
    *palette.LANES.values(),
    *palette.OTHER_LANES,
    *palette.MEMORY.values(),
}
FEW = 12  # pixels: so many of a colour that nobody chose may come about where a letter ends


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "notebooks" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def pictures_in(outputs):
    return [base64.b64decode(output.data["image/png"]) for output in outputs if "image/png" in output.get("data", {})]


def told(cell):
    """What a cell printed, and the tables that it showed, without blank lines."""
    printed = [output.text for output in cell.outputs if output.output_type == "stream"]
    tables = [output.data["text/markdown"] for output in cell.outputs if "text/markdown" in output.get("data", {})]
    lines = "".join([*printed, *tables]).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


def differences(one, other, is_timed):
    """Where two texts say something else: any word, and any number by a hundredth unless runs need not share it."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return [(one, other)]
    numbers = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return [] if is_timed else [(a, b) for a, b in numbers if float(b) != pytest.approx(float(a), rel=0.01)]


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {"01_pipeline", "02_schedules", "03_zero", "04_ssp", "05_hybrid"}


@pytest.mark.timeout(150)  # a new interpreter: what a notebook imports is not there yet
def test_first_cells_and_all_imports_run(tmp_path):
    sources = {}
    for path in NOTEBOOKS:
        first, *others = (cell.source for cell in code_cells(read(path)))
        nodes = [node for source in others for node in ast.walk(ast.parse(source))]
        imports = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        sources[path.stem] = "\n".join([first, *imports])
    code = """
import json, sys, traceback
for name, source in json.load(sys.stdin).items():
    try:
        exec(compile(source, name, "exec"), {"__name__": name})
    except BaseException:
        print(f"The first cell of {name} fails:", traceback.format_exc())
"""
    own = {"TMPDIR": str(tmp_path), "MPLBACKEND": "agg", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | own,
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


@pytest.mark.timeout(300)  # half a minute where nothing else runs
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem < "02" else [pytest.mark.slow]) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_run_says_what_is_stored(path, script, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # Jupyter warns where it has to guess its folders
    notebook, stored = read(path), read(path)
    script.execute(notebook, tmp_path)
    assert len(pictures_in(outputs_of(notebook))) == len(pictures_in(outputs_of(stored))) > 0
    others = stored.metadata["lightning_parallel"]["drawn"] != script.drawn()  # weights that a run begins with
    for new, old in zip(code_cells(notebook), code_cells(stored), strict=True):
        found = differences(told(old), told(new), others or "timed" in old.metadata.get("tags", ()))
        assert not found, f"run python notebooks/run.py {path.stem}"
    assert not list(tmp_path.iterdir())  # it leaves nothing where it runs


def test_what_differs_is_seen():
    assert not differences("loss 5.0264, 3 ranks", "loss 5.0265, 3 ranks", False)
    assert differences("loss 5.03, 3 ranks", "loss 5.03, 4 ranks", False) == [("3", "4")]
    assert differences("loss 5.03", "loss 5.13", False) and not differences("5.03 s", "9.9 s", True)
    assert differences("loss 5.03", "val_loss 5.03", True)


@every_notebook
def test_notebook_is_stored_as_it_ran(path, script):
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    stored = read(path).metadata.get("lightning_parallel", {}).get("version")
    assert stored == script.version(read(path)), f"run python notebooks/run.py {path.stem}"


@every_notebook
def test_stored_pictures_have_the_colours_of_the_palette(path):
    for picture in pictures_in(outputs_of(read(path))):
        assert len(picture) < 80_000
        assert not foreign_colours(picture)


def foreign_colours(picture):
    """Colours of a PNG that are matplotlib's own, in a line too, and those of areas that are not ours."""
    red, green, blue = numpy.moveaxis(numpy.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int), 2, 0)
    codes = red << 16 | green << 8 | blue
    middle, inside = codes[1:-1, 1:-1], numpy.ones_like(codes[1:-1, 1:-1], dtype=bool)
    for row in range(3):
        for column in range(3):
            beside = codes[row : row + middle.shape[0], column : column + middle.shape[1]]
            inside &= beside == middle  # what is as wide as a pixel is an edge
    return _named(codes) & set(FOREIGN) | _named(middle[inside]) - OURS


def _named(codes):
    found, counts = numpy.unique(codes, return_counts=True)
    return {f"#{code:06x}" for code, count in zip(found.tolist(), counts.tolist(), strict=True) if count >= FEW}


def test_colours_of_matplotlib_are_seen():
    def drawn(line, bar):
        target = io.BytesIO()
        with rc_context(dict(palette.STYLE)):
            figure = Figure(figsize=(3, 2))
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            axes.plot([0, 1, 2], [3, 1, 2], color=line)
            axes.bar([3], [2], color=bar)
            figure.savefig(target)
        return foreign_colours(target.getvalue())

    assert drawn("C0", palette.RED) == set()  # the style has a cycle of its own
    assert drawn("tab:blue", palette.RED) == {"#1f77b4"}
    assert drawn(palette.BLUE, "pink") == {"#ffc0cb"}
