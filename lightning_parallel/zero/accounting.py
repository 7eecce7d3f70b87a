"""The paper's accounting: bytes of model states a rank holds, and elements it moves in a step, for each stage.

The one idea: a stage says which of three kinds (parameters, gradients, optimizer states) are divided by the number of
ranks. Everything is exact arithmetic on integers and fractions; what a run adds to it (padding, one step counter a
parameter) is counted where it is made, in ``ledger``. Left out: activations and buffers, which no stage divides here.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

STAGES = (0, 1, 2, 3)
NAMES = {0: "baseline", 1: "zero_1", 2: "zero_2", 3: "zero_3"}


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter takes on one rank that divides nothing, by kind.

    The default is mixed precision with Adam: 16-bit parameters and gradients, and K = 12: a 32-bit copy of the
    parameter and two moments.

    Args:
        parameters: of the parameter that the forward reads.
        gradients: of its gradient.
        optimizer: K, of everything that the optimizer keeps.

    Example:
        >>> StateBytes().total, StateBytes(parameters=4, gradients=4, optimizer=8).total
        (16, 16)

    Source:
        Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1.
    """

    parameters: int = 2
    gradients: int = 2
    optimizer: int = 12

    @property
    def total(self) -> int:
        """Bytes a parameter without ZeRO."""
        return self.parameters + self.gradients + self.optimizer


MIXED_ADAM = StateBytes()


def bytes_by_kind(stage: int, ranks: int, of: StateBytes = MIXED_ADAM) -> dict[str, Fraction]:
    """Bytes a parameter takes on one rank, by kind.

    Stage 1 divides optimizer states, stage 2 gradients too, stage 3 parameters too. Stage 0 is plain data parallelism.

    Args:
        stage: 0, 1, 2 or 3.
        ranks: N, among which states are divided, at least 1.
        of: bytes a parameter by kind.

    Raises:
        ValueError: there is no such stage, or no rank.

    Example:
        >>> {kind: float(size) for kind, size in bytes_by_kind(2, 4).items()}
        {'parameters': 2.0, 'gradients': 0.5, 'optimizer': 3.0}

    Source:
        Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5 and figure 1.
    """
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r}: ZeRO has the stages 1, 2 and 3, and 0 is data parallelism without it.")
    if ranks < 1:
        raise ValueError(f"ranks={ranks!r}: states are divided among 1 rank or more.")
    divided = {"parameters": stage >= 3, "gradients": stage >= 2, "optimizer": stage >= 1}
    return {kind: Fraction(getattr(of, kind), ranks if by_n else 1) for kind, by_n in divided.items()}


def bytes_per_parameter(stage: int, ranks: int, of: StateBytes = MIXED_ADAM) -> Fraction:
    """Bytes of model states a parameter takes on one rank: 16, 4 + 12/N, 2 + 14/N, 16/N for mixed-precision Adam.

    Example:
        >>> [float(bytes_per_parameter(stage, 4)) for stage in (0, 1, 2, 3)]
        [16.0, 7.0, 5.5, 4.0]

    Source:
        Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5.
    """
    return sum(bytes_by_kind(stage, ranks, of).values(), Fraction(0))


def largest_model(stage: int, ranks: int, memory: int, of: StateBytes = MIXED_ADAM, model_parallel: int = 1) -> float:
    """Parameters of the largest model whose states fit, with nothing left for activations.

    Args:
        stage: see ``bytes_by_kind``.
        ranks: N, copies of the model.
        memory: bytes of one device.
        of: bytes a parameter by kind.
        model_parallel: devices that one copy is cut over.

    Example:
        >>> largest_model(3, 64, 32_000_000_000)
        128000000000.0

    Source:
        Rajbhandari et al., ZeRO, arXiv 1910.02054, table 2.
    """
    return float(model_parallel * memory / bytes_per_parameter(stage, ranks, of))


def volume_by_collective(stage: int) -> dict[str, int]:
    """Elements moved in a step of one micro-batch, in P, the number of parameters, by what moves them.

    A reduce-scatter or an all-gather of P elements moves P, an all-reduce is one of each. So data parallelism moves 2P,
    stages 1 and 2 no more, and stage 3, which gathers parameters for forward and backward, 3P.

    Raises:
        ValueError: there is no such stage.

    Example:
        >>> volume_by_collective(2), sum(volume_by_collective(3).values())
        ({'reduce_scatter': 1, 'all_gather': 1}, 3)

    Source:
        Rajbhandari et al., ZeRO, arXiv 1910.02054, section 7.
    """
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r}: ZeRO has the stages 1, 2 and 3, and 0 is data parallelism without it.")
    if stage == 0:
        return {"all_reduce": 2}
    return {"reduce_scatter": 1, "all_gather": 2 if stage == 3 else 1}


def volume_of_step(stage: int, backwards: int = 1) -> dict[str, int]:
    """Elements moved in a step of several micro-batches, in P, by collective.

    Gradients that are divided have to be reduced after every backward, and divided parameters gathered for it; stage 1
    keeps whole gradients and reduces them once.

    Args:
        stage: 0, 1, 2 or 3.
        backwards: micro-batches whose gradients one step of the optimizer takes.

    Example:
        >>> [sum(volume_of_step(stage, 4).values()) for stage in (0, 1, 2, 3)]
        [2, 2, 5, 12]
    """
    volume = volume_by_collective(stage)
    times = {"reduce_scatter": backwards if stage >= 2 else 1, "all_gather": backwards if stage == 3 else 1}
    return {collective: moved * times.get(collective, 1) for collective, moved in volume.items()}


def checkpoint_share(sequence: int, hidden: int, blocks: int) -> Fraction:
    """Elements that partitioned activation checkpoints add to what Megatron's tensor parallelism moves, as a share.

    One all-gather of a block's input, ``sequence * hidden``, on top of ``12 * sequence * hidden`` a block.

    Example:
        >>> float(checkpoint_share(1024, 8192, 24)) < 0.1
        True

    Source:
        Rajbhandari et al., ZeRO, arXiv 1910.02054, section 8.
    """
    return Fraction(sequence * hidden * blocks, 12 * sequence * hidden * blocks)
