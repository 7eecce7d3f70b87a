"""`SameCalls`: whether all ranks call the same parts of a model, where each call moves parameters that all ranks hold.

The one idea: a part that one rank calls and another does not makes them wait in different places, or takes one part's
values for another's. So what a rank is about to call is compared on the host: at every call where waiting for the host
costs little (CPUs, on which a mismatch would end the process without words), else once a backward, before a weight
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel.pipeline.stage.derivatives import RUNS_IT, is_transformed
from lightning_parallel.zero.reducer import Waiting

_DIGEST = 1 << 40


def _at_once(what: str) -> AbstractContextManager[Any]:
    return nullcontext()


class SameCalls:
    """Compares calls.

    Args:
        names: of the parts.
        group: for host tensors, of all ranks.
        engine: who needs it, for errors.
        every: compare every call, before anything moves; False compares all calls of a step at its `end`.
        waiting: a context entered while this process is blocked.

    Example:
        >>> calls = SameCalls(["net"], None, "fsdp2", every=False)
        >>> calls.call(0, "forward"); calls.end()
    """

    def __init__(
        self, names: Sequence[str], group: Any, engine: str, every: bool = True, waiting: Waiting = _at_once
    ) -> None:
        self.names, self.group, self.engine, self.every, self.waiting = list(names), group, engine, every, waiting
        self._digest = 0

    def call(self, number: int, way: str) -> None:
        """This rank is about to call a part, "forward" or "backward".

        Raises:
            ValueError: another rank calls another one, or it is called inside a function of `torch.func`.
        """
        if is_transformed():
            raise ValueError(
                f'engine="{self.engine}" gathers parameters where a part of the model is called, and the step calls'
                f" `{self.names[number]}` inside a function of torch.func (grad, vjp, jvp, vmap). {RUNS_IT}"
            )
        code = 1 + 2 * number + (way == "backward")
        if self.every:
            self._compare(code)
        else:
            self._digest = (self._digest * 1_000_003 + code) % _DIGEST

    def end(self) -> None:
        """A backward has ended here.

        Raises:
            ValueError: another rank called other parts.
        """
        digest, self._digest = self._digest, 0
        self._compare(digest)

    def _compare(self, code: int) -> None:
        if not dist.is_initialized():
            return
        codes = torch.tensor([code, -code])
        with self.waiting("the other ranks, to call the same part of the model"):
            dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=self.group)
        most, least = codes.tolist()
        if most != -least:
            raise ValueError(self._words(most, -least))

    def _words(self, most: int, least: int) -> str:
        calls = f" One rank is at {self._at(most)} when another is at {self._at(least)}." if self.every else ""
        return (
            f'engine="{self.engine}" gathers parameters where a part of the model is called, and the ranks call'
            f" different ones in a step.{calls} Decide branches by what all ranks see alike, or use"
            ' ZeROStrategy(stage=2, engine="native"), whose ranks may differ.'
        )

    def _at(self, code: int) -> str:
        if not code:
            return "the end of its backward"
        number, backwards = divmod(code - 1, 2)
        return f"the {'backward' if backwards else 'forward'} of `{self.names[number]}`"
