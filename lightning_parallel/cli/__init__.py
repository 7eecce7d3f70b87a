"""The command ``lightning-parallel``: which part of it is meant, and what it can do.

``fit``, ``validate``, ``test`` and ``predict`` are LightningCLI (``trainer_cli``), ``schedule`` is the schedule tool
(``schedule_command``), ``memory`` the calculator of model states (``memory_command``). Each is imported only when it is
asked for.
"""

import difflib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "fit": "train a LightningModule",
    "validate": "run its validation loop",
    "test": "run its test loop",
    "predict": "run its predict loop",
    "consolidate": "make one checkpoint file of a sharded checkpoint's folder",
    "schedule": "print, draw, cost or export a pipeline schedule; no model needed",
    "memory": "print the bytes of model states on each rank for every stage of ZeRO; no model needed",
}

HELP = """\
usage: lightning-parallel COMMAND [options]        lightning-parallel COMMAND --help

commands:
{commands}

examples:
  lightning-parallel fit --config configs/pipeline/digits_1f1b.yaml
  lightning-parallel fit --config run.yaml --trainer.strategy PipelineStrategy --trainer.strategy.num_microbatches 8
  lightning-parallel fit --config run.yaml --print_config
  lightning-parallel schedule 1f1b --stages 4 --microbatches 8 --png 1f1b.png
  lightning-parallel memory --params 7.5e9 --ranks 64

Strategies and callbacks of this package, and the classes of lightning_parallel.demo, go by their short names:
{names}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        argv: what follows the command's name; none reads ``sys.argv``. Other processes that a strategy starts are given
            ``sys.argv``, so pass ``argv`` only with one process or with ``start_method="fork"``.
    """
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read what is printed has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if command == "--version":
        from lightning_parallel import __version__

        print(f"lightning-parallel {__version__}")
        return 0
    if command not in COMMANDS:
        print(_unknown(command), file=sys.stderr)
        return 2
    if command == "consolidate":
        return _consolidate(arguments[1:])
    if command == "memory":
        return _memory(arguments[1:])
    return _schedule(arguments[1:]) if command == "schedule" else _trainer(arguments)


def _schedule(arguments: list[str]) -> int:
    from lightning_parallel.cli import schedule_command

    return schedule_command.main(arguments)


def _consolidate(arguments: list[str]) -> int:
    from lightning_parallel.cli import consolidate_command

    return consolidate_command.main(arguments)


def _memory(arguments: list[str]) -> int:
    from lightning_parallel.cli import memory_command

    return memory_command.main(arguments)


def _trainer(arguments: list[str]) -> int:
    from lightning_parallel.cli import trainer_cli

    return trainer_cli.run(arguments)


def _help() -> str:
    from lightning_parallel.cli import trainer_cli

    commands = "\n".join(f"  {name:<11} {text}" for name, text in COMMANDS.items())
    return HELP.format(commands=commands, names=trainer_cli.describe_names())


def _unknown(command: str) -> str:
    if command.startswith("-"):
        return f"lightning-parallel: the command comes first, got {command!r}. Commands: {', '.join(COMMANDS)}."
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"lightning-parallel: there is no command {command!r}.{hint} Commands: {', '.join(COMMANDS)}."
