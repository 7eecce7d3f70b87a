"""What the papers promise of the named schedules, to stand beside what is simulated and measured.

All for equal stages, T_F = T_I = T_W (T_B twice that) and no communication. A formula that holds from some number of
micro-batches on gives None below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_parallel.pipeline.schedules import spec

Numbers = Mapping[str, Any]  # D, M and the schedule's options
Peak = Callable[[int, Numbers], float]


@dataclass(frozen=True)
class Formula:
    """Closed forms of one schedule, in D ranks, M micro-batches, r the rank and the schedule's options.

    Args:
        text: of the bubble ``idle``.
        bubble: the same as a function of (waiting, work): what a rank waits and works, in units of any size.
        span: the bubble ``span``: the same as ``idle``, zero, or without a formula.
        peak: activations that rank r holds.
        holds: from where on the formulas hold; always, where it is left out.
        condition: the same in words.
    """

    text: str
    bubble: Callable[[Numbers], tuple[float, float]]
    peak: Peak
    span: Literal["same", "zero", "none"] = "same"
    holds: Callable[[Numbers], bool] = lambda n: True
    condition: str = ""


def _whole(n: Numbers) -> tuple[float, float]:
    return n["D"] - 1, n["M"]


def _split(n: Numbers) -> tuple[float, float]:
    return n["D"] - 1, 3 * n["M"]


TABLE: dict[str, Formula] = {
    "naive": Formula("(D-1)/D", lambda n: (n["D"] - 1, 1), lambda r, n: 1),
    "gpipe": Formula("(D-1)/(M+D-1)", _whole, lambda r, n: n["M"]),
    "1f1b": Formula("(D-1)/(M+D-1)", _whole, lambda r, n: min(n["M"], n["D"] - r)),
    "dapple": Formula(
        "(D-1)/(M+D-1)",
        _whole,
        lambda r, n: min(n["M"], n["policy"] * (n["D"] - r) - n["policy"] + 1),
        holds=lambda n: n["limit"] == 0,
        condition="no limit",
    ),
    "interleaved_1f1b": Formula(
        "(D-1)/(vM+D-1)",
        lambda n: (n["D"] - 1, n["v"] * n["M"]),
        lambda r, n: min(n["v"] * n["M"], 2 * (n["D"] - 1 - r) + (n["v"] - 1) * n["D"] + 1) / n["v"],
        holds=lambda n: n["M"] % n["D"] == 0 and n["group"] in (0, n["D"]),
        condition="D divides M",
    ),
    "looped_bfs": Formula(
        "(D-1)/(vM+D-1)",
        lambda n: (n["D"] - 1, n["v"] * n["M"]),
        lambda r, n: n["M"],
        holds=lambda n: n["M"] >= n["D"] or n["v"] == 1,
        condition="M >= D",
    ),
    "zb_h1": Formula(
        "(D-1)/(3M+D-1)",
        _split,
        lambda r, n: min(n["M"], n["D"]),
        holds=lambda n: n["M"] >= n["D"],
        condition="M >= D",
    ),
    "zb_h2": Formula(
        "(D-1)/(3M+D-1)",
        _split,
        lambda r, n: 2 * n["D"] - 1,
        span="zero",
        holds=lambda n: n["M"] >= 2 * n["D"] - 1,
        condition="M >= 2D-1",
    ),
    "zb_1p": Formula(
        "(D-1)/(3M+D-1)",
        _split,
        lambda r, n: n["D"],
        holds=lambda n: n["M"] >= n["D"] and n["weight_share"] == 1,
        condition="M >= D",
    ),
    "interleaved_zb": Formula(
        "(D-1)/(3vM+D-1)",
        lambda n: (n["D"] - 1, 3 * n["v"] * n["M"]),
        lambda r, n: n["D"],
        holds=lambda n: n["M"] % n["D"] == 0 and n["group"] in (0, n["D"]),
        condition="D divides M",
    ),
    "zb_v": Formula(
        "(D-1)/(6M+D-1)",
        lambda n: (n["D"] - 1, 6 * n["M"]),
        lambda r, n: n["D"],
        span="zero",
        holds=lambda n: n["M"] >= 2 * n["D"] - 1,
        condition="M >= 2D-1",
    ),
    "zb_v_auto": Formula(
        "(D-1)/(6M+D-1)",
        lambda n: (n["D"] - 1, 6 * n["M"]),
        lambda r, n: n["D"],
        span="none",
        holds=lambda n: n["M"] >= n["D"] and n["weight_share"] == 1 and not n["limit"],
        condition="M >= D",
    ),
    "gems": Formula(
        "1 - 3M/(M(2D+1)+D-1)",
        lambda n: (2 * n["M"] * (n["D"] - 1) + n["D"] - 1, 3 * n["M"]),
        lambda r, n: 1,
        span="none",
    ),
    "chimera": Formula(
        "(D/f-2)/(3M/2+D/f-2)",
        lambda n: (n["D"] / n["pairs"] - 2, 1.5 * n["M"]),
        lambda r, n: n["D"] / 2 / n["pairs"] + 1 + min(r, n["D"] - 1 - r),
        holds=lambda n: n["M"] == n["D"] and n["pairs"] == 1,
        condition="M = D, one pair",
    ),
    "chimera:doubling=true": Formula(
        "(D-2)/(2M+D-2)",
        lambda n: (n["D"] - 2, 2 * n["M"]),
        lambda r, n: n["D"] * 3 / 2 + 1 + min(r, n["D"] - 1 - r),
        holds=lambda n: n["M"] % (2 * n["D"]) == 0,
        condition="2D divides M",
    ),
    "dualpipe": Formula(
        "(D/2-1)/(3M+D/2-1)",
        lambda n: (n["D"] / 2 - 1, 3 * n["M"]),
        lambda r, n: n["D"] + 1,
        holds=lambda n: n["M"] >= 2 * n["D"] and n["M"] % 2 == 0,
        condition="M >= 2D, M even",
    ),
    "dualpipe_v": Formula(
        "(D-1)/(6M+D-1)",
        lambda n: (n["D"] - 1, 6 * n["M"]),
        lambda r, n: n["D"] + 0.5,
        holds=lambda n: n["M"] >= 2 * n["D"],
        condition="M >= 2D",
    ),
    "terapipe": Formula(
        "(D-1)/(MK+D-1)",
        lambda n: (n["D"] - 1, n["M"] * n["slices"]),
        lambda r, n: n["M"],
    ),
}


def formula_text(name: str) -> str | None:
    """The bubble's formula of a schedule's name, with or without options; None where there is none.

    Example:
        >>> formula_text("interleaved_1f1b:v=3")
        '(D-1)/(vM+D-1)'
    """
    formula = find_formula(name)
    return None if formula is None else formula.text


def find_formula(name: str) -> Formula | None:
    """The entry of ``TABLE`` for a schedule's name: options that are switched on may have one of their own."""
    short, options = spec.parse(name)
    return TABLE.get(spec.write(short, {key: value for key, value in options.items() if value is True}))


def bubble_formula(name: str, num_ranks: int, num_microbatches: int, span: bool = False) -> float | None:
    """Closed form of the bubble at equal costs and no communication, or None where there is none.

    ``(D - 1) / (M + D - 1)`` for GPipe [1] and 1F1B [2], ``(D - 1) / D`` for one micro-batch at a time; a rank that is
    the first to start and the last to end has the same bubble by ``idle`` and ``span``. Where every rank works without
    a gap (ZB-H2, ZB-V [3]) ``span`` is 0, and ``idle`` is the time by which the last rank starts later.

    Args:
        name: of the schedule, with its options.
        num_ranks: D.
        num_microbatches: M.
        span: the bubble ``span`` instead of ``idle``.

    Example:
        >>> bubble_formula("gpipe", 4, 9)
        0.25
        >>> bubble_formula("interleaved_1f1b:v=3", 4, 8), bubble_formula("v_half", 4, 8)
        (0.1111111111111111, None)

    Source:
        [1] Huang et al., GPipe, arXiv 1811.06965, section 2.3. [2] Narayanan et al., arXiv 2104.04473, section 2.2,
        where it is divided by the ideal instead of the total time: ``(D - 1) / M``, and ``(D - 1) / (v M)``
        interleaved. [3] Qi et al., arXiv 2401.10241. Chimera, GEMS: Li and Hoefler, arXiv 2107.06925, table 2.
        DualPipe: ``(D/2 - 1)(F&B + B - 3W)`` with a pair as one action; half of it, as here, if a pair runs F then B.
    """
    found = _numbers(name, num_ranks, num_microbatches)
    if found is None or (span and found[0].span == "none"):
        return None
    formula, numbers = found
    waiting, work = formula.bubble(numbers)
    return 0.0 if span and formula.span == "zero" else waiting / (waiting + work)


def peak_formula(name: str, num_ranks: int, num_microbatches: int) -> list[float] | None:
    """Closed form of the activations each rank holds, in activations of one full stage, or None where there is none.

    M for GPipe, ``min(M, D - r)`` on rank r for 1F1B, 1 for one micro-batch at a time. Memory between I and W counts in
    full.

    Example:
        >>> peak_formula("1f1b", 4, 8)
        [4, 3, 2, 1]

    Source:
        Narayanan et al., arXiv 2104.04473, section 2.2.1; Qi et al., arXiv 2401.10241, table 2; the README of
        github.com/deepseek-ai/DualPipe.
    """
    found = _numbers(name, num_ranks, num_microbatches)
    return found and [found[0].peak(rank, found[1]) for rank in range(num_ranks)]


def _numbers(name: str, num_ranks: int, num_microbatches: int) -> tuple[Formula, Numbers] | None:
    """The formulas of a name and the numbers to put in, or None where they do not hold."""
    from lightning_parallel.pipeline.schedules import SCHEDULES  # the generators know their options

    short, options = spec.parse(name)
    formula = find_formula(name)
    if formula is None:
        return None
    numbers = {"D": num_ranks, "M": num_microbatches} | spec.options_of(SCHEDULES[short]) | options
    return (formula, numbers) if formula.holds(numbers) else None
