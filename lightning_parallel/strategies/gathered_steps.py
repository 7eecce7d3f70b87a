"""When a pipeline's parameters are whole that its copies along the data axis divide: around steps, and in evaluations.

The one idea: a step that gathers once has its parameters whole from its begin to its end; one that gathers for every
micro-batch lets the engine's actions ask for them, and its first of a kind finds out how blocks are used.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning_parallel.pipeline.batch import microbatch
from lightning_parallel.strategies.hybrid_checkpoints import DividedCheckpoints
from lightning_parallel.zero.closed_parameters import only_shapes
from lightning_parallel.zero.native.stage_states import StageStates


class GatheredSteps(DividedCheckpoints):
    """The part of `DividedPipeline` that runs steps.

    Args:
        zero_stage: see `DividedPipeline`.
        **kwargs: see `PipelineStrategy`.
    """

    def __init__(self, zero_stage: int, **kwargs: Any) -> None:
        super().__init__(zero_stage, **kwargs)
        self._evaluates = False  # whether an evaluation is under way
        self._learnt: set[str] = set()  # kinds of steps of which it is known how they use blocks

    @contextmanager
    def _gathered(self, kind: str, batch: Any, args: tuple[Any, ...]) -> Iterator[None]:
        """Around a step of stage 3: parameters are whole inside, or while an action runs.

        What gathers once keeps parameters from the first batch of an evaluation to its end, since copies may have
        different numbers of batches there.
        """
        states, once, training = self._states, self.windows is None, kind == "training"
        if states is None or self.zero_stage < 3:
            yield
            return
        if self._is_first_batch(training):
            states.pause()  # who still trains is told, before collectives of two kinds meet
        if once and not training:
            if not self._evaluates:
                states.windows.hold()
            self._evaluates = True
            yield
            return
        self._evaluates = not training
        whole = states.begin(0, True) if once else self._begin_by_block(states, kind, batch, args)
        if not once and kind not in self._learnt:
            self._learnt.add(kind)
            with states.windows.learning(states.agree):
                yield
            return
        with states.windows.whole() if whole else nullcontext():
            yield

    def _begin_by_block(self, states: StageStates, kind: str, batch: Any, args: tuple[Any, ...]) -> bool:
        """All copies begin a step; whether its parameters have to be whole as long as it runs."""
        sizes, memory = self._sizes(batch), self.memory_of(kind, args)

        def signatures() -> list[Hashable]:
            found = memory.cutting(batch, sum(sizes)) if len(sizes) > 1 else None
            return self.pipeline.signatures(kind, microbatch.split(batch, sizes, memory.fields, found))

        return states.begin(len(sizes), self.repeats.may_repeat(kind, signatures))

    def _is_first_batch(self, training: bool) -> bool:
        assert self.lightning_module is not None
        if training:
            return self.lightning_module.trainer.fit_loop.epoch_loop.batch_idx == 0
        return not self._evaluates

    def whole_parameters(self) -> AbstractContextManager[None]:
        """For hooks: inside, this rank's parameters are whole also in stage 3, where they cannot be read between steps.
        All ranks enter it, and what all of them write inside stays."""
        return nullcontext() if self._states is None or self._released else self._states.windows.whole()

    def _compare_replicas(self, when: str) -> None:
        with self.whole_parameters():
            super()._compare_replicas(when)

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        in_step = self._metrics is not None and self.metrics.in_step
        with nullcontext() if in_step else only_shapes(), super()._forward_context():
            yield

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._free_after_evaluation()

    def _free_after_evaluation(self) -> None:
        if self._states is not None and self._evaluates and self.windows is None:
            self._states.windows.let_go()
        self._evaluates = False
