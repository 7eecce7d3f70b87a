"""Into how many slices a sequence is cut, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Slices:
    """The slices of every sequence.

    Args:
        number: K.
        lengths: tokens of each slice; None for equal ones (the first ones longer by one where K does not divide).

    Example:
        >>> Slices(3).bounds(8)
        ((0, 3), (3, 6), (6, 8))
        >>> Slices(2, (5, 3)).bounds(8)
        ((0, 5), (5, 8))
    """

    number: int
    lengths: tuple[int, ...] | None = None

    @classmethod
    def of(cls, given: int | Sequence[int]) -> Slices:
        """From a number of slices or their lengths."""
        return cls(given) if isinstance(given, int) else cls(len(given), tuple(given))

    def bounds(self, length: int) -> tuple[tuple[int, int], ...]:
        """First position of each slice of a sequence, and the one behind its last.

        Args:
            length: T, tokens of the sequence.

        Raises:
            ValueError: there are fewer tokens than slices, or the lengths do not add up to them.
        """
        if self.lengths is not None and sum(self.lengths) != length:
            raise ValueError(
                f"slices={list(self.lengths)} are {sum(self.lengths)} tokens, but the sequences of a micro-batch have"
                f" {length}. Give lengths that add up to it, or a number of slices."
            )
        if length < self.number:
            raise ValueError(
                f"A sequence of {length} tokens cannot be cut into {self.number} slices. Use fewer slices, or longer"
                " sequences."
            )
        whole, longer = divmod(length, self.number)
        lengths = self.lengths or tuple(whole + (number < longer) for number in range(self.number))
        return tuple(pairwise(accumulate(lengths, initial=0)))
