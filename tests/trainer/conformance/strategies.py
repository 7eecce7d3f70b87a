"""The strategies that the suite runs over: adding one is adding an entry here.

A strategy that refuses something by design names it in ``refuses``, with the words a user gets; then these words are
what is asserted, in place of parity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_parallel  # noqa: F401  (registers the strings)


@dataclass(frozen=True)
class Entry:
    """A strategy under test.

    Args:
        name: its string in Lightning's registry.
        ranks: how many processes run it.
        options: what it is built with, beside what the string says.
        whole_batches: options with which a step sees its batch whole, as BatchNorm needs to equal one process.
        refuses: what it refuses by design (names in ``test_refused.REFUSED``), and a part of what it says.
        core: whether it runs only the scenarios that are marked so, since a sibling runs all of them.
    """

    name: str
    ranks: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    whole_batches: Mapping[str, Any] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    core: bool = False

    def make(self, whole_batches: bool = False) -> Strategy:
        """A new strategy object."""
        registered = StrategyRegistry[self.name]
        options = {**registered["init_params"], **self.options, **(self.whole_batches if whole_batches else {})}
        return registered["strategy"](**options)

    def __str__(self) -> str:
        return f"{self.name} on {self.ranks}"


PIPELINE: dict[str, Any] = {
    "options": {"num_microbatches": 4},
    "whole_batches": {"num_microbatches": 1},
    "refuses": {},
}
STRATEGIES = (
    Entry("pipeline_1f1b", 2, **PIPELINE),
    Entry("pipeline_gpipe", 4, **PIPELINE, core=True),
    Entry("pipeline_naive", 2, **PIPELINE, core=True),
)
