"""Which elements of a push are sent now: one small class for each rule.

What is not chosen is not lost: ``Filters`` keeps it for the next push.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Selector:
    """A rule that narrows down the elements that are sent."""

    def choose(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """A mask, shape (n,) bool, of the elements to send.

        Args:
            values: shape (n,), the push and what was left behind before.
            generator: for rules that draw.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SignificantlyModified(Selector):
    """Elements whose unsent change has grown beyond a threshold.

    Args:
        threshold: least magnitude that is sent, >= 0.

    Example:
        >>> SignificantlyModified(0.1).choose(torch.tensor([0.05, -0.2]), torch.Generator()).tolist()
        [False, True]

    Source:
        Li et al., OSDI 2014, section 3.6.
    """

    threshold: float

    def choose(self, values: Tensor, generator: torch.Generator) -> Tensor:
        return values.abs() > self.threshold


@dataclass(frozen=True)
class RandomSkip(Selector):
    """Each element with a probability.

    Args:
        keep: probability that an element is sent, above 0, at most 1.

    Raises:
        ValueError: it is not.

    Source:
        Li et al., OSDI 2014, section 3.6.
    """

    keep: float

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"RandomSkip got keep={self.keep}. It is a probability: use a number in (0, 1].")

    def choose(self, values: Tensor, generator: torch.Generator) -> Tensor:
        return torch.rand(values.numel(), generator=generator) < self.keep


@dataclass(frozen=True)
class TopK(Selector):
    """The share of elements with the greatest magnitudes.

    Args:
        share: of all elements, above 0, at most 1; at least one element is sent.

    Raises:
        ValueError: it is not.

    Example:
        >>> TopK(0.5).choose(torch.tensor([3.0, -4.0, 1.0, 0.0]), torch.Generator()).tolist()
        [True, True, False, False]

    Source:
        Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"TopK got share={self.share}. It is a share of all elements: use a number in (0, 1].")

    def choose(self, values: Tensor, generator: torch.Generator) -> Tensor:
        count = max(1, int(values.numel() * self.share))
        mask = torch.zeros(values.numel(), dtype=torch.bool)
        mask[values.abs().topk(count).indices] = True
        return mask
