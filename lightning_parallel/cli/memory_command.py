"""``lightning-parallel memory``: bytes of model states on each rank, for every stage of ZeRO, before anything runs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from lightning_parallel.zero.accounting import (
    MIXED_ADAM,
    NAMES,
    STAGES,
    StateBytes,
    bytes_by_kind,
    volume_by_collective,
)

_SUFFIXES = {"K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
_FORMULAS = {
    0: "({p} + {g} + {k}) P",
    1: "({p} + {g} + {k}/N) P",
    2: "({p} + ({g} + {k})/N) P",
    3: "({p} + {g} + {k})/N P",
}


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Args:
        argv: the words after ``lightning-parallel memory``.

    Example:
        >>> main("--params 7.5e9 --ranks 64 --json".split())
        {"baseline": 120000000000, "zero_1": 31406250000, "zero_2": 16640625000, "zero_3": 1875000000}
        0
    """
    arguments = _parser().parse_args(argv)
    of = StateBytes(arguments.parameter_bytes, arguments.gradient_bytes, arguments.optimizer_bytes)
    totals = bytes_of_stages(arguments.params, arguments.ranks, of)
    print(json.dumps(totals) if arguments.json else report(arguments.params, arguments.ranks, of))
    return 0


def bytes_of_stages(parameters: int, ranks: int, of: StateBytes = MIXED_ADAM) -> dict[str, int]:
    """Bytes of model states on the fullest rank, by stage; fractions of a byte are rounded up.

    Example:
        >>> bytes_of_stages(1000, 4)
        {'baseline': 16000, 'zero_1': 7000, 'zero_2': 5500, 'zero_3': 4000}
    """
    return {
        NAMES[stage]: math.ceil(parameters * sum(bytes_by_kind(stage, ranks, of).values(), Fraction(0)))
        for stage in STAGES
    }


def report(parameters: int, ranks: int, of: StateBytes = MIXED_ADAM) -> str:
    """The table for people, in GB of 10^9 bytes as in the paper, formula and traffic beside it."""
    letters = {"p": of.parameters, "g": of.gradients, "k": of.optimizer}
    lines = [
        f"P = {parameters:.4g} parameters on N = {ranks} ranks, GB (10^9 bytes) a rank; activations come on top",
        "",
        f"{'stage':<10}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'all':>12}   {'formula':<24}{'moved'}",
    ]
    for stage in STAGES:
        kinds = [float(parameters * size / 10**9) for size in bytes_by_kind(stage, ranks, of).values()]
        numbers = "".join(f"{size:>12.4g}" for size in (*kinds, sum(kinds)))
        moved = f"{sum(volume_by_collective(stage).values())}P"
        lines.append(f"{NAMES[stage]:<10}{numbers}   {_FORMULAS[stage].format(**letters):<24}{moved}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="lightning-parallel memory", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--params", type=_count, required=True, metavar="P", help="parameters of the model, as 7.5e9 or 7.5B"
    )
    parser.add_argument("--ranks", type=_count, required=True, metavar="N", help="ranks that share the states")
    parser.add_argument("--parameter-bytes", type=_bytes, default=MIXED_ADAM.parameters, help="a parameter; default 2")
    parser.add_argument("--gradient-bytes", type=_bytes, default=MIXED_ADAM.gradients, help="a gradient; default 2")
    parser.add_argument(
        "--optimizer-bytes",
        type=_bytes,
        default=MIXED_ADAM.optimizer,
        help="K of the paper: 12 for Adam with 32-bit copies (default), 8 for Adam on 32 bits, 4 for momentum",
    )
    parser.add_argument("--json", action="store_true", help="print bytes by stage as one line of JSON, nothing else")
    return parser


def _count(text: str) -> int:
    """A whole number, as 64, 7.5e9 or 7.5B.

    Example:
        >>> _count("7.5B"), _count("125M"), _count("64")
        (7500000000, 125000000, 64)
    """
    digits, power = (text[:-1], _SUFFIXES[text[-1].upper()]) if text[-1:].upper() in _SUFFIXES else (text, 0)
    try:
        number = Decimal(digits).scaleb(power)
    except ArithmeticError:
        number = Decimal("nan")
    if not (number.is_finite() and number >= 1 and number == int(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more, such as 64, 7.5e9 or 7.5B")
    return int(number)


def _bytes(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 12")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
