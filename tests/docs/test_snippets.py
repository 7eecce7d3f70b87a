"""Every block of code of README, CONTRIBUTING and docs does what it says, in few steps.

A block names its language. Python of a page runs in one process, one block behind the other; the command line reads
YAML; commands of `lightning-parallel` run, others name what exists. What takes minutes runs as it stands in
`make test-slow`.
"""

import contextlib
import doctest
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_parallel
from lightning_parallel import callbacks, cli, demo
from lightning_parallel.cli import consolidate_command, trainer_cli
from tests.harness import run_ranks
from tests.pages import MARKDOWN, ROOT, Snippet, commands, snippets, text_of

LANGUAGES = {"python", "pycon", "yaml", "csv", "sh", "text"}  # text: drawings, and what somebody prints
FEW = "max_steps=2, limit_val_batches=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,"
FEW += " enable_model_summary=False"
# What is other here than on the page: few steps of few forked processes on a CPU, and workers that share a process.
INSTEAD = {
    "README.md": {
        "devices=4, max_steps=100": f"devices=2, {FEW}",
        "num_microbatches=8)": 'num_microbatches=8, start_method="fork")',
    },
    "docs/meshes.md": {
        'accelerator="gpu", devices=4, num_nodes=2, max_steps=100': f'accelerator="cpu", devices=4, {FEW}',
        ", zero_stage=1)\n    trainer": ', start_method="fork")\n    trainer',
    },
    "docs/parameter_server.md": {
        "num_workers=2": "num_workers=1",
        "helper.work(loss_and_gradient)": "Thread(target=helper.work, args=(loss_and_gradient,), daemon=True).start()",
    },
}
# What the text of a page speaks of, and its blocks use.
GIVEN = """
from threading import Thread
import torch
from lightning.pytorch import Trainer
from lightning_parallel import *
from lightning_parallel.pipeline.planning.choice import choose
vector, gradient, num_portions = torch.zeros(8), torch.ones(8), 2
def loss_and_gradient(x, portion):
    return (x - portion).square().sum().item(), 2 * (x - portion)
"""


def of(language: str) -> list[Snippet]:
    return [snippet for page in MARKDOWN for snippet in snippets(page) if snippet.language == language]


def test_every_block_names_its_language():
    unknown = [str(s) for page in MARKDOWN for s in snippets(page) if s.language not in LANGUAGES]
    assert not unknown, f"blocks of another language than {', '.join(sorted(LANGUAGES))}: {', '.join(unknown)}"


# -- Python ----------------------------------------------------------------------------------------------------------

PYTHON = sorted({snippet.page for snippet in of("python")})


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path):
    """What a page's later block uses its earlier ones have made."""
    blocks = few_steps(page)

    def run(rank: int) -> None:
        os.chdir(tmp_path)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # this process is none of several, but starts them
            del os.environ[name]
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(GIVEN, space)
        for snippet, text in blocks:
            exec(compile("\n" * (snippet.line - 1) + text, str(snippet.page), "exec"), space)

    run_ranks(run, 1, group=False, timeout=55)


def few_steps(page: Path) -> list[tuple[Snippet, str]]:
    """The blocks of a page and what runs in their place; what stands in for something has to be on the page."""
    instead = INSTEAD.get(str(page.relative_to(ROOT)), {})
    whole = "\n".join(snippet.text for snippet in snippets(page))
    assert all(text in whole for text in instead), f"INSTEAD names what {page.name} no longer says"
    blocks = []
    for snippet in snippets(page):
        if snippet.language == "python":
            text = snippet.text
            for theirs, ours in instead.items():
                text = text.replace(theirs, ours)
            blocks.append((snippet, text))
    return blocks


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_script_of_the_readme_runs_as_it_stands(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(of("python")[0].text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "bubble" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("snippet", of("pycon"), ids=str)
def test_examples_give_what_they_show(snippet: Snippet):
    space: dict[str, Any] = {}
    exec(GIVEN, space)
    test = doctest.DocTestParser().get_doctest(
        snippet.text + "\n", space, str(snippet), str(snippet.page), snippet.line
    )
    said = io.StringIO()
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.write).failed == 0, (
        said.getvalue()
    )


# -- YAML ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parser():
    """That of `lightning-parallel fit`, without the command in front of its options."""
    return trainer_cli.parser()


@pytest.mark.parametrize("snippet", of("yaml"), ids=str)
def test_yaml_is_taken(snippet: Snippet, parser):
    said = yaml.safe_load(snippet.text)
    read = parser.parse_object(run_of(said) if set(said) & {"trainer", "model", "data"} else run_of({"trainer": said}))
    assert read.trainer.strategy.class_path.endswith(".PipelineStrategy")


def run_of(said: dict[str, Any]) -> dict[str, Any]:
    """A whole run of what a text says of one."""
    return {"model": {"class_path": "GPT"}, "data": {"class_path": "TextDataModule"}, **said}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_file_of_the_readme_runs_as_it_stands(tmp_path):
    (tmp_path / "run.yaml").write_text(of("yaml")[0].text)
    command = [sys.executable, "-m", *["lightning_parallel", "fit", "--config", "run.yaml"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


# -- commands --------------------------------------------------------------------------------------------------------

OURS = sorted({line for page in MARKDOWN for line in commands(text_of(page), "lightning-parallel")})


@pytest.mark.parametrize("line", OURS)
def test_command_runs(line: str, tmp_path, monkeypatch, parser):
    """`fit` reads its file; the others do what they are for, but for those whose arguments are CAPITALS."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(of("csv")[0].text + "\n")
    (tmp_path / "run.yaml").write_text(of("yaml")[0].text)
    command, *arguments = shlex.split(line)[1:]
    assert command in cli.COMMANDS
    if command == "fit":
        assert arguments[0] == "--config"
        path = tmp_path / arguments[1] if arguments[1] == "run.yaml" else ROOT / arguments[1]
        parser.parse_object(run_of(yaml.safe_load(path.read_text())))
    elif command == "consolidate" and arguments:
        consolidate_command._parser().parse_args(arguments)
    elif arguments:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert cli.main([command, *arguments]) == 0
        assert said.getvalue()


@pytest.mark.parametrize(
    "page", [*MARKDOWN, ROOT / "Makefile", *sorted((ROOT / "benchmarks").glob("*.py"))], ids=lambda p: p.name
)
def test_scripts_have_the_flags_that_pages_give_them(page: Path):
    """`python SCRIPT --flag`: the script exists, and says the flag."""
    for line in commands(text_of(page), "python"):
        words = [word for word in shlex.split(line)[1:] if "=" not in word]
        if not words or not words[0].endswith(".py") or "/" not in words[0]:
            continue
        source = (ROOT / words[0]).read_text()
        missing = [word for word in words[1:] if re.fullmatch(r"--[\w-]+", word) and f'"{word}"' not in source]
        assert not missing, f"{page.name} says `{line}`, and {words[0]} has no {', '.join(missing)}"


TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
MAKES = [*MARKDOWN, ROOT / "Makefile", *sorted((ROOT / ".ci").iterdir()), *WORKFLOWS]


@pytest.mark.parametrize("page", MAKES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_has_what_pages_ask_it_for(page: Path):
    wanted = {target for line in lines_of_make(page) for target in re.findall(r"(?<= )[a-z][\w-]*(?= |$)", line)}
    assert wanted <= TARGETS, f"{page.name} asks for `make {' '.join(sorted(wanted - TARGETS))}`"


def lines_of_make(page: Path) -> list[str]:
    """Command lines that begin with `make`: in blocks and backticks, in scripts, in steps of workflows, in comments."""
    text = page.read_text()
    if page in WORKFLOWS:
        return [said for said in texts_in(yaml.safe_load(text)) if said.startswith("make ")]
    if page.name == "Makefile":
        return re.findall(r"^# (make \S+)", text, re.MULTILINE)
    if page.suffix == ".md":
        shell = "\n".join(snippet.text for snippet in snippets(page) if snippet.language == "sh")
        return [*re.findall(r"`(make [^`]+)`", text), *re.findall(r"^(make [^#\n]+)", shell, re.MULTILINE)]
    return re.findall(r"^(make .+)$", text, re.MULTILINE)


def texts_in(tree: Any) -> list[str]:
    """All texts in what a YAML file says."""
    if isinstance(tree, dict | list):
        return [text for part in (tree.values() if isinstance(tree, dict) else tree) for text in texts_in(part)]
    return [tree] if isinstance(tree, str) else []


def test_workflows_do_what_ci_does():
    """Between them they run what `.ci/run` and `.ci/lowest` run, and tests with newer versions."""
    (run,), (lowest,) = (lines_of_make(ROOT / ".ci" / name) for name in ("run", "lowest"))
    steps = " ".join(line for path in WORKFLOWS for line in lines_of_make(path))
    assert set(run.split()) | set(lowest.split()) | {"VERSIONS=newest"} <= set(steps.split())
    for path in WORKFLOWS:
        jobs = yaml.safe_load(path.read_text())["jobs"]
        assert all(job["timeout-minutes"] <= 45 and "run" in job["steps"][-1] for job in jobs.values())


def test_links_lead_somewhere():
    dead = []
    for page in MARKDOWN:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                dead.append(f"{page.name}: {target}")
    assert not dead


# -- what is said in passing -----------------------------------------------------------------------------------------


def callables() -> dict[str, list[str]]:
    """What our public classes and functions take, by short name."""
    takes = dict(trainer_cli._arguments())
    for home in (lightning_parallel, callbacks, demo, importlib.import_module("lightning_parallel.parameter_server")):
        for name in home.__all__:
            if not issubclass(type(getattr(home, name)), type) or "__init__" in vars(getattr(home, name)):
                takes.setdefault(name, list(inspect.signature(getattr(home, name)).parameters))
    return takes


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_arguments_that_pages_name_exist(page: Path):
    """In `PipelineStrategy(schedule=..., num_microbatches=)` and the like."""
    takes, wrong = callables(), []
    for name, inside in re.findall(r"\b([A-Z]\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)", text_of(page)):
        for argument in re.findall(r"(?:^|, ?|\n)\s*([a-z]\w*)=", inside):
            if name in takes and argument not in takes[name]:
                wrong.append(f"{name}({argument}=)")
    assert not wrong
