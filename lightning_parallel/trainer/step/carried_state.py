"""State that a step carries from batch to batch, as a recurrent network's hidden state, found in the first step.

The one idea: in one process the next batch reads it, in a pipeline the next micro-batch would. In the first step a
tensor that a micro-batch leaves in an attribute notes whether it is read; where the next micro-batch reads it and
leaves another in its place, it is carried. Left out: what has no dimension of rows (a running mean, a count), buffers,
and lists, which others may hold and append to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.pipeline.stage.side_effects import Attributes, is_same, tensor_attributes
from lightning_parallel.pipeline.stage.stage_run import StepCut

Where = tuple[str, str]  # submodule, attribute


class _Noting(Tensor):
    """A tensor that tells when something is done with it."""

    tell: Callable[[], object]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(x: _Noting) -> Tensor:
            vars(x)["tell"]()
            with torch._C.DisableTorchFunctionSubclass():
                return x.as_subclass(Tensor)

        args, kwargs = tree_map_only(_Noting, plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class CarriedState:
    """Watches the micro-batches of one step on one rank.

    Args:
        module: whose attributes are watched, and those of what it holds.

    Attributes:
        read: what the micro-batch that runs has read of what another left.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        inside = {part for metric in metrics for part in metric.modules()}  # they see all rows one after the other
        self._passed_over = {name for name, part in module.named_modules() if part in inside}
        self._left: dict[Where, Any] = {}  # attributes that notes were put into, and what stands there
        self.read: set[Where] = set()

    @contextmanager
    def watching(self, rows: int) -> Iterator[None]:
        """Around a micro-batch's run of the step.

        Raises:
            ValueError: it read and replaced what another left behind.
        """
        self.read = set()
        before = self.attributes(lists=False)
        try:
            yield
        except StepCut:
            self._look(before, rows)
            raise
        self._look(before, rows)

    def attributes(self, lists: bool = True) -> Attributes:
        """The tensors that are in attributes now, and `lists` of them."""
        found = tensor_attributes(self._module)
        return {
            where: value
            for where, value in found.items()
            if where[0] not in self._passed_over and (lists or not isinstance(value, list))
        }

    def _look(self, before: Attributes, rows: int) -> None:
        changed = {
            where: value
            for where, value in self.attributes(lists=False).items()
            if not is_same(before.get(where), value)
        }
        for where, value in changed.items():
            if where in self.read and _has_rows(value, rows):
                self.end()
                raise ValueError(_says(where))
            if _has_rows(value, rows):
                self._put(where, tree_map_only(Tensor, partial(self._noting, where), value))

    def end(self) -> None:
        """The step is over: leave the last micro-batch's values as they were set."""
        for where, noting in self._left.items():
            module, name = self._module.get_submodule(where[0]), where[1]
            if is_same(vars(module).get(name), noting):
                with torch._C.DisableTorchFunctionSubclass():
                    vars(module)[name] = tree_map_only(_Noting, lambda t: t.as_subclass(Tensor), noting)
        self._left.clear()

    def _put(self, where: Where, value: Any) -> None:
        vars(self._module.get_submodule(where[0]))[where[1]] = value
        self._left[where] = value

    def _noting(self, where: Where, tensor: Tensor) -> Tensor:
        noting = tensor.as_subclass(_Noting)
        vars(noting)["tell"] = lambda: self.read.add(where)
        return noting


def _has_rows(value: Any, rows: int) -> bool:
    tensors = [value] if isinstance(value, Tensor) else value
    return any(not isinstance(t, Phantom) and rows in t.shape for t in tensors)


def _says(where: Where) -> str:
    name = ".".join(part for part in ("self", *where) if part)
    return (
        f"The step leaves `{name}` behind, and its next run reads it: state that is carried from batch to batch. A"
        " pipeline runs the step once a micro-batch, so that micro-batches would hand it to each other. Give it with"
        " the batch, reset it in every step, or use num_microbatches=1. check_loss=False skips this comparison."
    )
