"""Blocks launched as CUDA graphs: where the host takes longer to launch a block than the device to compute it.

The one idea: a block has three graphs (forward, I and W) for every micro-batch under way at a time, captured once and
replayed for every micro-batch that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_parallel.pipeline.stage.side_effects import left_behind, tensor_attributes
from lightning_parallel.pipeline.weight_grad import backward_inputs, hook_on_saved_tensors

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


ANCHOR = torch.empty(0, requires_grad=True)  # what makes outputs require a gradient where no argument does
Work = Callable[..., Any]


class Slot:
    """A block's three graphs for one micro-batch at a time, and the memory that they read and write."""

    def __init__(self, block: BlockGraphs, work: Work, leaves: Sequence[Any], spec: TreeSpec, free: list[Slot]) -> None:
        self.block, self._free = block, free
        self._pool = torch.cuda.graph_pool_handle()
        stream, current = block.shared.stream, torch.cuda.current_stream(block.shared.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.inputs = [_like(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            self._capture_forward(work, leaves, spec)
            self._capture_backward()
        current.wait_stream(stream)

    # -- capture -------------------------------------------------------------------------------------------------------

    def _capture_forward(self, work: Work, leaves: Sequence[Any], spec: TreeSpec) -> None:
        static = iter(self.inputs)
        args, kwargs = tree_unflatten([next(static) if isinstance(x, Tensor) else x for x in leaves], spec)
        with self._capturing() as self._forward, _uncached_autocast():
            result = work(*args, **kwargs)
        made, self._spec = tree_flatten(result)
        self._constants = [None if isinstance(x, Tensor) else x for x in made]
        self._is_tensor = [isinstance(x, Tensor) for x in made]
        tensors = [x for x in made if isinstance(x, Tensor)]
        self._roots = [x for x in tensors if x.requires_grad]
        self.differentiable = [x.requires_grad for x in tensors]
        self.outputs = [x.detach() for x in tensors]

    def _capture_backward(self) -> None:
        parameters, shared = [p for p in self.block.parameters if p.requires_grad], self.block.shared
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = shared.accumulator(p)
        self._incoming = [torch.empty_like(root) for root in self._roots]
        with self._capturing() as self._inputs_backward, _noting(parameters) as come_with_inputs:
            waiting = backward_inputs(self._roots, self._incoming)
        del self._roots
        self.input_gradients = [x.grad for x in self.inputs]
        self._kept = list(waiting.tensors())
        used = {id(p) for p in (*come_with_inputs, *waiting.parameters())}
        self._sums = [(p, shared.accumulator(p)) for p in parameters if id(p) in used]
        with self._capturing() as self._weights_backward:
            waiting.run(fused=True)
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
        for x in self.inputs:
            x.requires_grad_(False).grad = None

    @contextmanager
    def _capturing(self) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()

    # -- replay --------------------------------------------------------------------------------------------------------

    def refuse_other(self, tensors: Sequence[Tensor]) -> None:
        """Raise for arguments of other shapes than the micro-batch's signature had before."""
        for static, tensor in zip(self.inputs, tensors, strict=True):
            if static.shape != tensor.shape or static.dtype != tensor.dtype:
                raise ValueError(
                    f"Block `{self.block.name}` gets {tensor.dtype} {tuple(tensor.shape)} where it got"
                    f" {static.dtype} {tuple(static.shape)} before for a batch of the same shapes. Use"
                    " PipelineStrategy(cuda_graphs=False)."
                )

    def run(self, tensors: Sequence[Tensor]) -> None:
        """The forward."""
        _copy(self.inputs, tensors)
        self._forward.replay()

    def packed(self, outputs: Sequence[Tensor]) -> Any:
        """What the block returns."""
        tensors = iter(outputs)
        made = [next(tensors) if t else c for t, c in zip(self._is_tensor, self._constants, strict=True)]
        return tree_unflatten(made, self._spec)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the arguments; those of the weights follow at once, or wait where an I runs."""
        wanted = [g for g, d in zip(gradients, self.differentiable, strict=True) if d]
        absent = [room for room, g in zip(self._incoming, wanted, strict=True) if g is None]
        if absent:
            torch._foreach_zero_(absent)
        there = [(room, g) for room, g in zip(self._incoming, wanted, strict=True) if g is not None]
        _copy([room for room, _ in there], [g for _, g in there])
        self._begin_sums()
        self._inputs_backward.replay()
        made = self.input_gradients
        if self.block.sends_gradients:
            made = [None if g is None else g.clone() for g in made]
        if self.block.shared.left is None:
            self.weights()
        else:
            self.block.shared.left.append(self)
        return made

    @torch.no_grad()
    def _begin_sums(self) -> None:
        """Let the gradients go on from what is there."""
        new = [(p, total) for p, total in self._sums if p.grad is not total]
        for parameter, total in new:
            if parameter.grad is not None:
                total.copy_(parameter.grad)
        if empty := [total for parameter, total in new if parameter.grad is None]:
            torch._foreach_zero_(empty)
        for parameter, total in new:
            parameter.grad = total

    def weights(self) -> None:
        """The gradients of the weights; then the slot is free."""
        self._weights_backward.replay()
        if self in self.block.shared.lent:
            del self.block.shared.lent[self]
            self.release()

    def release(self) -> None:
        """Nobody needs what is in the slot."""
        self._free.append(self)


class Replay(torch.autograd.Function):
    """A slot's place in the graph of a step."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, slot: Slot, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slot = slot
        slot.run(tensors)
        outputs = tuple(output.detach() for output in slot.outputs)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, slot.differentiable, strict=True) if not d))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.slot.backward(gradients))


@contextmanager
def _noting(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters that get a gradient inside."""
    noted: list[Tensor] = []
    hooks = [p.register_post_accumulate_grad_hook(noted.append) for p in parameters]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def _like(x: Tensor) -> Tensor:
    """Memory of its own for an argument."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t.data_ptr() != s.data_ptr()]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])


def _uncached_autocast() -> AbstractContextManager[Any]:
    """Autocast as it is, without its cache of cast weights, which a graph must not read."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False)
