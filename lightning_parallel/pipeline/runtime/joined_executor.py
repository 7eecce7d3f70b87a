"""A stage whose forwards run in turns, and whose backwards are one.

The one idea: of a stage's forwards in a step only the last one in the row acts, for all of them; likewise of its
backwards and its weight gradients. What travels stays what each micro-batch sends, in the row's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.runtime.receiving import SavedForward
from lightning_parallel.pipeline.runtime.stage_executor import StageExecutor
from lightning_parallel.pipeline.runtime.turns import run_in_turns, swap_of
from lightning_parallel.pipeline.runtime.work import Joined, StepWork
from lightning_parallel.pipeline.schedule import Action
from lightning_parallel.pipeline.stage.derivatives import LOOKED_AT
from lightning_parallel.pipeline.weight_grad.deferred import Deferred


class JoinedStageExecutor:
    """One step of an executor.

    Args:
        executor: the executor.
        row: the actions of its rank.
        joined: of the step.

    Attributes:
        at: the action that runs, of those that run as one.
    """

    def __init__(self, executor: StageExecutor, row: Sequence[Action], joined: Joined) -> None:
        self._executor, self._joined = executor, joined
        mine = [action for action in row if action.stage == executor.stage]
        self._of_kind = {kinds: [action for action in mine if action.kind in kinds] for kinds in ("F", "BI", "W")}
        self.at: Action | None = None

    def do(self, action: Action, work: StepWork, ready: Callable[[], None]) -> Mapping[int, Any]:
        """Do an action; returns results of steps by micro-batch."""
        kinds = next(kinds for kinds in self._of_kind if action.kind in kinds)
        actions: list[Action] = self._of_kind[kinds]
        results: Mapping[int, Any] = {}
        if action != actions[-1]:
            ready()
        elif kinds == "F":
            results = self._forward(actions, work, ready)
        elif kinds == "BI":
            self._backward(actions, work, ready)
        else:
            ready()
            self._executor.weights(action, work)
        return results

    def _forward(self, actions: Sequence[Action], work: StepWork, ready: Callable[[], None]) -> Mapping[int, Any]:
        """All forwards."""
        executor, came = self._executor, list[SavedForward]()
        for self.at in actions:
            came.append(executor.receive(self.at, work))
        ready()
        signatures = [work.signatures[action.microbatch] for action in actions]
        known = not any(executor.learns(signature, work.training) for signature in signatures)
        forwards = [
            partial(executor.run, action, held, work, known) for action, held in zip(actions, came, strict=True)
        ]
        return dict(zip([action.microbatch for action in actions], self._in_turns(actions, forwards), strict=True))

    def _in_turns(self, actions: Sequence[Action], functions: Sequence[Callable[[], Any]]) -> list[Any]:
        cut = self._executor.cut
        world = [
            (lambda: cut.active, cut.switch_to), swap_of(cut.streams, "state"),
            *(swap_of(*where) for where in LOOKED_AT), *self._joined.world,
        ]  # fmt: skip

        def of(action: Action, function: Callable[[], Any]) -> Any:
            self.at = action
            return function()

        return run_in_turns(
            [partial(of, *pair) for pair in zip(actions, functions, strict=True)],
            self._joined.together,
            [swap_of(self, "at"), *world],
        )

    def _backward(self, actions: Sequence[Action], work: StepWork, ready: Callable[[], None]) -> None:
        """All backwards, as one: the graphs of micro-batches meet in what they were joined for."""
        executor, gradients, all_held = self._executor, list[Tensor](), list[SavedForward]()
        for self.at in actions:
            held = executor.take_held(self.at)
            all_held.append(held)
            gradients += executor.gradients(self.at, held, work)
        ready()
        runs = [held for held in all_held if held.again]
        if runs:
            self._in_turns(actions, [partial(executor.run_again, held, work) for held in runs])
        roots = [root for held in all_held for root in held.roots()]
        if gradients and roots:
            deferred = self._deferred(actions, roots)
            with self._replay(all_held), work.early.backward(actions[-1]) if work.early is not None else nullcontext():
                if deferred is None:
                    torch.autograd.backward(roots, gradients)
                else:
                    deferred.backward(gradients)
                    executor.wait_for_weights(self._of_kind["W"][-1], deferred)
        for held in all_held:
            for arrival, contract in held.came:
                arrival.send_gradients(held.inbox, contract)

    def _deferred(self, actions: Sequence[Action], roots: Sequence[Any]) -> Deferred | None:
        return Deferred(roots, self._executor.cut.graphs) if actions[-1].kind == "I" else None

    @contextmanager
    def _replay(self, all_held: Sequence[SavedForward]) -> Iterator[None]:
        """While the backward runs, which computes blocks of every micro-batch again."""
        runs = [held.run for held in all_held if held.run is not None]
        with ExitStack() as stack:
            for run in runs:
                stack.enter_context(run.replay())
            if len(runs) > 1:
                stack.enter_context(self._executor.cut.active_as(_OneOfSeveral()))  # type: ignore[arg-type]
            yield


class _OneOfSeveral:
    """The active run where a unit is called and nobody knows for which micro-batch."""

    plain, again = False, True

    def call(self, *args: Any) -> Any:
        raise PhantomError(
            "A checkpoint around blocks computes them again in a backward of all micro-batches, whose batch norms"
            ' normalise by the whole batch. Use recompute="block" or "stage" in place of checkpoints in the step, put'
            " them inside of blocks, or use num_microbatches=1."
        )
