"""Remedies that messages name work when they are followed: those of the command line and of what is not installed."""

import argparse
import subprocess
import sys

import jsonargparse
import pytest

from lightning_parallel import HybridStrategy, ParameterServerStrategy, PipelineStrategy, cli
from lightning_parallel.checkpoint import files
from lightning_parallel.cli import memory_command, schedule_command
from lightning_parallel.cli.trainer_cli import explain_option
from lightning_parallel.parallel.auto import _counts_positions
from lightning_parallel.trainer.launch.script_launcher import refuse_no_script


def test_parameters_may_be_given_in_billions(capsys):
    assert memory_command.main(["--params", "7.5B", "--ranks", "64", "--json"]) == 0
    first = capsys.readouterr().out
    assert memory_command.main(["--params", "7.5e9", "--ranks", "64", "--json"]) == 0
    assert capsys.readouterr().out == first
    for wrong in ("B", "7.5", "nanB", "-1M", "7.0000000001B1"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"no whole number of 1 or more, such as 64, 7\.5e9"):
            memory_command._count(wrong)


def test_the_schedule_command_chooses(capsys):
    assert schedule_command.main(["auto", "--ranks", "2", "--microbatches", "4", "--json"]) == 0
    assert '"ranks": 2' in capsys.readouterr().out
    assert schedule_command.main(["auto"]) == 2
    assert "needs --ranks and --microbatches" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--png", "--csv"])
def test_a_folder_that_is_not_there_is_named(option, tmp_path, capsys):
    line = f"1f1b --ranks 2 --microbatches 2 {option} {tmp_path / 'new' / 'a.png'}".split()
    assert schedule_command.main(line) == 2
    assert f"there is no folder {tmp_path / 'new'} to write a.png into; make it first." in capsys.readouterr().err
    (tmp_path / "new").mkdir()
    assert schedule_command.main(line) == 0 and (tmp_path / "new" / "a.png").exists()


def test_a_reader_that_goes_early_is_no_error():
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); from lightning_parallel.cli import main;"
    code += " sys.exit(main(['schedule', '--version']) if False else main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "BrokenPipe" not in done.stderr
    assert cli.COMMANDS


def test_an_option_of_a_filter_is_answered_with_the_filters_own():
    assert explain_option("shar").startswith("Did you mean share?")
    assert "TopK takes: share." in explain_option("shar")
    assert "replication?" not in explain_option("ratio") and "TopK takes: share." in explain_option("ratio")


def test_a_folder_that_is_no_file_is_told_how_to_become_one(tmp_path):
    (folder := tmp_path / "last.ckpt").mkdir()
    with pytest.raises(ValueError, match=r"is a folder, .* lightning-parallel consolidate \S+last.ckpt \S+last-whole"):
        files.read(folder)


@pytest.mark.parametrize(("first", "words"), [("-", "the standard input"), ("-c", r"python -c")])
def test_a_script_without_a_file_is_told_another_start_method(monkeypatch, first, words):
    monkeypatch.setattr(sys, "argv", [first])
    with pytest.raises(ValueError, match=rf'{words}.*Use PipelineStrategy\(start_method="fork"\)'):
        refuse_no_script("PipelineStrategy")
    PipelineStrategy(start_method="fork")


def test_arguments_are_checked_before_packages_are_asked_for(monkeypatch):
    from lightning_parallel.strategies import parameter_server

    def missing() -> None:
        raise ModuleNotFoundError("pyzmq")

    monkeypatch.setattr(parameter_server, "refuse_missing", missing)
    with pytest.raises(ValueError, match="num_servers"):
        ParameterServerStrategy(num_servers=0)
    with pytest.raises(ModuleNotFoundError):
        ParameterServerStrategy()


@pytest.mark.parametrize("name", ["text.position_embedding", "wpe", "pos_emb", "encoder.embed_positions"])
def test_a_table_of_positions_is_no_vocabulary(name):
    assert _counts_positions(name)


@pytest.mark.parametrize("name", ["wte", "token_embedding", "embed_tokens", "composition"])
def test_a_table_of_tokens_is_one(name):
    assert not _counts_positions(name)


@pytest.mark.parametrize("fields", [{"x": "row"}, ["x"], {1.5: "rows"}, "rows"])
def test_batch_fields_are_checked_where_the_strategy_is_made(fields):
    with pytest.raises(ValueError, match=r'batch_fields is a mapping of names of fields to "rows" or "whole"'):
        PipelineStrategy(batch_fields=fields)


@pytest.mark.parametrize("kind", [PipelineStrategy, HybridStrategy])
def test_batch_fields_are_read_from_yaml(kind):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    plugins = {"parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
    parser.add_class_arguments(kind, "strategy", skip=plugins)
    read = parser.parse_string("strategy: {batch_fields: {cu_seqlens: whole, 1: rows, in.mask: whole}}")
    fields = kind(batch_fields=read.strategy.batch_fields).batch_fields
    assert [fields.kind(name) for name in [("cu_seqlens",), ("1",), ("in", "mask")]] == ["whole", "rows", "whole"]
    with pytest.raises(jsonargparse.ArgumentError, match="batch_fields"):
        parser.parse_string("strategy: {batch_fields: {x: row}}")
