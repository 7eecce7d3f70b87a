"""The command line: what it answers, mistakes above all. In process, without training anything."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_parallel import cli
from lightning_parallel.cli.trainer_cli import explain, explain_option
from lightning_parallel.strategies import registry
from tests.harness import imported_anew

RUN = ["fit", "--model", "DigitsClassifier", "--data", "DigitsDataModule"]
STRINGS = ", ".join(sorted(registry.STRINGS))


def answer(capsys, *arguments: str) -> str:
    """The text with which the command line refuses the arguments."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([*RUN, *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def printed_config(capsys, *arguments: str) -> dict:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, "--print_config"])
    assert stopped.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_help_lists_commands_strategies_strings_and_callbacks(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("fit", "validate", "test", "predict", "schedule", "PipelineStrategy", "BubbleMonitor", "GPT"):
        assert name in text
    assert STRINGS in text


def test_no_command_shows_the_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert capsys.readouterr().out.startswith("usage: lightning-parallel COMMAND")


def test_misspelt_command(capsys):
    assert cli.main(["fti"]) == 2
    assert capsys.readouterr().err == (
        "lightning-parallel: there is no command 'fti'. Did you mean 'fit'? "
        "Commands: fit, validate, test, predict, consolidate, schedule, memory.\n"
    )


def test_option_before_the_command(capsys):
    assert cli.main(["--config", "x.yaml"]) == 2
    assert capsys.readouterr().err.startswith("lightning-parallel: the command comes first, got '--config'.")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("PipelineStratgy", "PipelineStrategy"),
        ("pipelinestrategie", "PipelineStrategy"),
        ("lightning_parallel.strategies.PipelineStratgy", "PipelineStrategy"),
        ("pipeline_1f1", "pipeline_1f1b"),
        ("pipline_gpipe", "pipeline_gpipe"),
        ("dpp", "ddp"),
    ],
)
def test_misspelt_strategy(capsys, given, meant):
    text = answer(capsys, "--trainer.strategy", given)
    assert text.startswith(
        f"lightning-parallel: trainer.strategy was given {given!r}, which is not a strategy. Did you mean {meant}?\n"
        "Strategies of lightning_parallel: HybridStrategy, ParameterServerStrategy, PipelineStrategy,"
        " TensorParallelStrategy, ZeROStrategy.\n"
        f"Strategy strings of lightning_parallel: {STRINGS}.\n"
    )
    assert "    class_path: PipelineStrategy\n" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[PipelineStrategy]", "a list; a run has one strategy. Did you mean PipelineStrategy?"),
        ('[{"class_path": "PipelineStrategy"}]', "a list; a run has one strategy. Did you mean PipelineStrategy?"),
        ('{"class_path": "PipelineStratgy"}', "which is not a strategy. Did you mean PipelineStrategy?"),
        ('{"clas_path": "PipelineStrategy"}', "which has no class_path. Did you mean PipelineStrategy?"),
        ("zzz", "which is not a strategy.\n"),
    ],
)
def test_other_forms_of_strategy_in_a_file(capsys, tmp_path, given, said):
    config = tmp_path / "run.yaml"
    config.write_text(f"trainer:\n  strategy: {given}\n")
    text = answer(capsys, "--config", str(config))
    assert text.startswith("lightning-parallel: trainer.strategy was given ")
    assert said in text


def test_misspelt_argument_of_a_strategy(capsys, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("trainer:\n  strategy: {class_path: PipelineStrategy, init_args: {num_microbatchs: 8}}\n")
    text = answer(capsys, "--config", str(config))
    assert "Option 'num_microbatchs' is not accepted\nDid you mean num_microbatches?\n" in text
    assert "PipelineStrategy takes: schedule, num_microbatches, blocks, partition, " in text


def test_arguments_that_a_strategy_hands_on_are_its_own():
    text = explain_option("pipline_parallel_size")
    assert text.startswith("Did you mean pipeline_parallel_size?\nHybridStrategy takes: data_parallel_size, ")
    assert all(name in text for name in ("schedule", "num_microbatches", "recompute", "timeout"))


def test_an_argument_of_another_class_is_no_spelling_mistake():
    text = explain_option("every_n_steps")
    assert "Did you mean" not in text and "MemoryMonitor takes: every_n_steps, picture, activations." in text


def test_wrong_type_of_an_argument(capsys, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("trainer:\n  strategy: {class_path: PipelineStrategy, init_args: {num_microbatches: few}}\n")
    text = answer(capsys, "--config", str(config))
    assert "Given value: few" in text
    assert "num_microbatches is an argument of HybridStrategy, PipelineStrategy, TensorParallelStrategy." in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's calls of jsonargparse
def test_a_value_that_a_strategy_refuses_is_answered_with_its_words(capsys):
    arguments = ["--trainer.strategy", "PipelineStrategy", "--trainer.strategy.num_microbatches", "0"]
    text = answer(capsys, "--seed_everything", "1", *arguments)
    assert text.endswith("lightning-parallel: PipelineStrategy(num_microbatches=0): num_microbatches is at least 1.\n")


def test_missing_argument_of_a_strategy_is_told_whose_it_is():
    text = explain("the following arguments are required: num_microbatches")
    owners = "HybridStrategy, PipelineStrategy, TensorParallelStrategy"
    assert text.endswith(f"required: num_microbatches\nnum_microbatches is an argument of {owners}.")


def test_misspelt_model(capsys):
    text = answer(capsys, "--model", "DigitsClasifier")
    assert "Did you mean DigitsClassifier?" in text
    assert "BubbleMonitor" in text


def test_misspelt_callback(capsys):
    assert "Did you mean BubbleMonitor?" in answer(capsys, "--trainer.callbacks", "BubbleMonitr")


@pytest.mark.parametrize("spelling", ["PipelineStrategy", "lightning_parallel.strategies.PipelineStrategy"])
def test_a_bare_class_path_is_taken(capsys, spelling):
    options = ["--trainer.strategy", spelling, "--trainer.strategy.num_microbatches", "4"]
    strategy = printed_config(capsys, *RUN, *options)["trainer"]["strategy"]
    assert strategy["class_path"].endswith("PipelineStrategy")
    assert strategy["init_args"]["num_microbatches"] == 4


@pytest.mark.parametrize(
    ("strategy", "option", "value"),
    [
        ("TensorParallelStrategy", "sequence_parallel", True),
        ("TensorParallelStrategy", "start_method", "fork"),
        ("HybridStrategy", "schedule", "zb_v"),
        ("ParameterServerStrategy", "timeout", "0:10:00"),
    ],
)
def test_options_that_a_strategy_passes_on_are_taken(capsys, strategy, option, value):
    arguments = ["--trainer.strategy", strategy, f"--trainer.strategy.{option}", str(value)]
    assert printed_config(capsys, *RUN, *arguments)["trainer"]["strategy"]["init_args"][option] == value


@pytest.mark.parametrize("name", ["auto", "ddp", "pipeline_1f1b", "pipeline_zb_v"])
def test_strategy_strings_stay_strings(capsys, name):
    assert printed_config(capsys, *RUN, "--trainer.strategy", name)["trainer"]["strategy"] == name


CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
FIRST = [next(path for path in CONFIGS if path.parent == folder) for folder in {path.parent for path in CONFIGS}]


@pytest.mark.parametrize(
    "config",
    [pytest.param(path, marks=[] if path in FIRST else [pytest.mark.slow]) for path in CONFIGS],
    ids=lambda path: path.stem,
)
def test_print_config_round_trips(capsys, tmp_path, config):
    once = printed_config(capsys, "fit", "--config", str(config))
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(once))
    assert printed_config(capsys, "fit", "--config", str(tmp_path / "again.yaml")) == once


@pytest.mark.parametrize("module", ["lightning_parallel", "lightning_parallel.cli"])
def test_runs_as_a_module_too(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("lightning-parallel ")


def test_package_imports_without_jsonargparse():
    def missing(rank: int) -> list[str]:
        import lightning_parallel as again

        return [name for name in again.__all__ if not hasattr(again, name)]

    assert imported_anew(missing, without=("jsonargparse",)) == []


def test_every_public_name_has_a_home():
    import lightning_parallel

    assert set(lightning_parallel.__all__) == set(lightning_parallel._HOMES)
    typed = ast.parse(Path(lightning_parallel.__file__).read_text())
    named = {a.asname or a.name for n in ast.walk(typed) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert set(lightning_parallel.__all__) <= named


def test_a_wrong_public_name_is_answered_with_the_names():
    import lightning_parallel

    with pytest.raises(AttributeError, match="has no attribute 'Pipeline'; it has Action, BubbleMonitor"):
        _ = lightning_parallel.Pipeline
