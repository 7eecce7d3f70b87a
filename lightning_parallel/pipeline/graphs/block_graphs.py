"""Blocks launched as CUDA graphs: where the host takes longer to launch a block than the device to compute it.

The one idea: a block's kernels are captured once for every micro-batch that is under way at a time (a *slot*), as three
graphs: its forward, its input gradients (I) and its weight gradients (W). A call then copies the arguments into the
slot, replays one graph and hands out what it left; a whole backward replays two. Gradients of weights are added up in
memory that stays, within the kernels that make them where these can. Random numbers are drawn from the module's own
stream at every replay, as they are without graphs.

Left out: what is Python in a block (side effects, choices by values) happens at capture only. Calls that nobody will
back up run as they are, so do blocks with hooks on modules, parameters or saved tensors, and the whole of the first
step. A block that leaves tensors behind as attributes is refused: they would be those of another micro-batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from lightning_parallel.pipeline.graphs.graph_slot import ANCHOR, Replay, Slot, Work
from lightning_parallel.pipeline.stage.side_effects import left_behind, tensor_attributes
from lightning_parallel.pipeline.weight_grad import hook_on_saved_tensors

_CONSTANTS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


class BlockGraphs:
    """The graphs of one block.

    Args:
        name: of the block, for messages.
        module: the block.
        shared: what the blocks of a rank have in common.
        sends_gradients: whether the gradients of its arguments leave the rank, where they may be taken late.
    """

    def __init__(self, name: str, module: nn.Module, shared: SharedGraphs, sends_gradients: bool) -> None:
        self.name, self.module, self.shared, self.sends_gradients = name, module, shared, sends_gradients
        self.parameters = list(module.parameters())
        self._hooks = [hooks for part in module.modules() for hooks in _hooks_of(part)]
        self._free: dict[Hashable, list[Slot]] = {}

    def call(self, work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `work(*args, **kwargs)`, the block's own call, returns."""
        if not self.shared.is_on or not torch.is_grad_enabled() or self._is_watched():
            return work(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = self._key(leaves)
        if key is None or not any(x.requires_grad for x in (*tensors, *self.parameters)):
            return work(*args, **kwargs)
        free = self._free.setdefault((self.shared.mode, spec, key), [])
        slot = free.pop() if free else self._capture(work, leaves, spec, free)
        slot.refuse_other(tensors)
        self.shared.lent[slot] = None
        return slot.packed(Replay.apply(ANCHOR, slot, *tensors))

    @staticmethod
    def _key(leaves: Sequence[Any]) -> Hashable | None:
        """What tells calls apart that are not replays of one another; None where arguments do not tell."""
        constants = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        if not _CONSTANTS.issuperset(map(type, constants)):
            return None
        return tuple(leaf.requires_grad if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)

    def _is_watched(self) -> bool:
        """Whether somebody's hooks would not be called in a replay."""
        if any(self._hooks) or hook_on_saved_tensors() is not None:
            return True
        return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters)

    def _capture(self, work: Work, leaves: Sequence[Any], spec: TreeSpec, free: list[Slot]) -> Slot:
        before, attributes = torch.cuda.memory_allocated(self.shared.device), tensor_attributes(self.module)
        try:
            slot = Slot(self, work, leaves, spec, free)
        except Exception as error:
            raise RuntimeError(
                f"Block `{self.name}` cannot be launched as a CUDA graph: {type(error).__name__}: {error}. It may read"
                " values on the host or make tensors there. Use PipelineStrategy(cuda_graphs=False)."
            ) from error
        self.shared.bytes += torch.cuda.memory_allocated(self.shared.device) - before
        for inside, attribute in left_behind(self.module, attributes):
            where = f"{self.name}.{inside}" if inside else self.name
            raise ValueError(
                f"Block `{self.name}` sets `{where}.{attribute}` in its forward, which with CUDA graphs would be"
                " that of another micro-batch. Return it, or use PipelineStrategy(cuda_graphs=False)."
            )
        return slot


class SharedGraphs:
    """What the graphs of a rank have in common.

    Attributes:
        is_on: whether blocks are replayed (not in the first training step, which libraries use to choose kernels).
        mode: what decides the shapes in the micro-batch that runs.
        left: slots whose weight gradients wait, while an I runs.
        lent: slots whose backward is still to come, in order.
        bytes: what all graphs hold: activations of the micro-batches under way, and the gradients' memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_on, self.mode, self.bytes = device, False, 0, 0
        self.left: list[Slot] | None = None
        self.lent: dict[Slot, None] = {}
        self._accumulators: dict[nn.Parameter, Tensor] = {}
        self._modes: dict[Hashable, int] = {}

    def enter(self, signature: Hashable) -> None:
        """A micro-batch of that signature runs."""
        self.mode = self._modes.setdefault(signature, len(self._modes))

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """What captures run on."""
        return torch.cuda.Stream(self.device)

    def end(self, training: bool) -> None:
        """A step is over: what no backward reached is free again; after the first training step blocks replay."""
        for slot in self.lent:
            slot.release()
        self.lent.clear()
        self.is_on |= training

    @contextmanager
    def leaving_weights(self) -> Iterator[list[Slot]]:
        """Around an I: the slots whose W is left for later."""
        left: list[Slot] = []
        self.left = left
        try:
            yield left
        finally:
            self.left = None

    def accumulator(self, parameter: nn.Parameter) -> Tensor:
        """The memory in which the parameter's gradient is added up."""
        if parameter not in self._accumulators:
            self._accumulators[parameter] = torch.zeros_like(parameter, requires_grad=False)
        return self._accumulators[parameter]

    def adds_to(self, parameter: nn.Parameter) -> bool:
        """Whether a block's graph adds to the parameter's gradient, unseen by hooks."""
        return parameter in self._accumulators

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient lies in memory that the next step writes to."""
        return parameter.grad is not None and parameter.grad is self._accumulators.get(parameter)


def _hooks_of(module: nn.Module) -> list[Any]:
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
