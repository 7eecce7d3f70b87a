"""Steps that call the model several times: noticed in the first step of a kind, which then begins anew.

The one idea: nobody knows beforehand how often a step calls a stage, and almost every step does it once. So the first
step of a kind runs as if it did. The stage that then misses a call of an earlier one makes the step void: all ranks go
through their actions in vain, what the step did to the model is undone, and it begins anew, knowing that calls have to
be found out (`pipeline.rounds`). Other steps pay nothing. Where stages use what any earlier one made, the users have to
be found out too, so no step begins without.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from lightning.pytorch import LightningModule

from lightning_parallel.pipeline.runtime.assembly import Pipeline
from lightning_parallel.pipeline.runtime.work import StepWork
from lightning_parallel.pipeline.stage.snapshot import Snapshot, untouched
from lightning_parallel.trainer.metrics.step_metrics import StepMetrics
from lightning_parallel.trainer.step.log_spreader import StepIsVoid


class RepeatedCalls:
    """Which kinds of steps call stages several times.

    Args:
        module: what may have to be put back.
        pipeline: what finds out about calls.
        metrics: what may be updated meanwhile.
        possible: whether shapes follow from signatures, so that calls can be found out once for each.
    """

    def __init__(self, module: LightningModule, pipeline: Pipeline, metrics: StepMetrics, possible: bool) -> None:
        self._module, self._pipeline, self._metrics = module, pipeline, metrics
        self._possible = possible and pipeline.num_stages > 1
        self._always = self._possible and pipeline.rounds.always
        self._seen: set[str] = set()
        self._repeating: set[str] = set()

    def run(self, kind: str, step: Callable[[], Any]) -> Any:
        """Run a step of that kind ("training", ...), a second time if the first was void."""
        if not self.is_first(kind):
            return step()
        before = Snapshot(self._module)
        try:
            result = step()
        except StepIsVoid:
            before.restore()
            self._pipeline.rounds.forget_agreements()
            self._repeating.add(kind)
            result = step()
        self._seen.add(kind)
        return result

    def is_first(self, kind: str) -> bool:
        """Whether the first step of a kind runs, which may become void."""
        return self._possible and not self._always and kind not in self._seen | self._repeating

    def is_settled(self, kind: str) -> bool:
        """Whether the first step of a kind is over, on every copy of the model: it may begin anew on one alone."""
        return not self._possible or self._always or kind in self._seen

    def is_again(self, kind: str) -> bool:
        """Whether the first step of a kind runs a second time, which other copies of the model need not do."""
        return kind in self._repeating and kind not in self._seen

    def may_repeat(self, kind: str, signatures: Callable[[], Sequence[Hashable]]) -> bool:
        """Whether a step of that kind may run parts of itself more often than once.

        Args:
            kind: of the step.
            signatures: gives those of its micro-batches.
        """
        asks = self._always and bool(self._pipeline.rounds.new(signatures()))
        return asks or self.is_first(kind) or kind in self._repeating

    def learn(self, kind: str, work: StepWork) -> None:
        """Before a step of a kind that repeats: find out about the calls of signatures that are new."""
        asks = self._always or kind in self._repeating
        new = self._pipeline.rounds.new(work.signatures) if asks else []
        for microbatch in new:
            with untouched(self._module), self._metrics.untouched(), self._pipeline.streams.step():
                self._pipeline.rounds.learn(work, microbatch)
