"""``lightning-parallel consolidate``: one checkpoint file from the folder of a sharded checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status.

    Args:
        argv: what follows ``consolidate``.
    """
    arguments = _parser().parse_args(argv)
    from lightning_parallel.checkpoint.sharded import consolidate

    try:
        consolidate(arguments.folder, arguments.file, weights_only=not arguments.trusted)
    except (ValueError, OSError, UnpicklingError) as error:
        print(f"lightning-parallel consolidate: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-parallel consolidate",
        description="Make one checkpoint file, as one process writes it, of a sharded checkpoint's folder. This process"
        " holds the whole model meanwhile.",
    )
    parser.add_argument("folder", type=Path, help='what PipelineStrategy(state_dict_type="sharded") wrote')
    parser.add_argument("file", type=Path, help="the file to write")
    parser.add_argument("--trusted", action="store_true", help="read Python objects too, which can run code")
    return parser
