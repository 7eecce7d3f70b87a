"""A block's three CUDA graphs for one micro-batch at a time: captured once, replayed for every one that follows.

The one idea: what a call reads and writes lies at fixed places, so arguments are copied in, a graph is replayed, and
what it left is handed out. To autograd a replay is one node. Which slot a call gets is `block_graphs.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_parallel.pipeline.weight_grad import backward_inputs

if TYPE_CHECKING:
    from lightning_parallel.pipeline.graphs.block_graphs import BlockGraphs

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
