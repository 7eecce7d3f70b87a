"""One micro-batch on one stage, slice by slice: forwards in the order of the sequence, backwards in reverse.

The one idea: a slice's graph ends at detached keys and values of the slices before it. Their gradients gather there
until the backward of the slice that made them begins, which is the last one to need them. So the backward of slice j
begins at what the slice sent, and at its keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.pipeline.stage.random_streams import RandomStreams
from lightning_parallel.pipeline.stage.stage_values import Place
from lightning_parallel.pipeline.token_slices.arguments import cut, refuse_ahead
from lightning_parallel.pipeline.token_slices.attention import KeysAndValues, SliceKeys
from lightning_parallel.pipeline.token_slices.call import BlockCall, stream_of
from lightning_parallel.pipeline.token_slices.check import real_arguments
from lightning_parallel.pipeline.token_slices.on_slice import BlockOnSlice
from lightning_parallel.pipeline.token_slices.plan import PlanRun
from lightning_parallel.pipeline.token_slices.repeats import RepeatedSlices

Made = dict[Any, Tensor]  # what blocks returned for a slice, by `Leaf`; what came in, by the Phantom it stands for


class SlicedMicrobatch:
    """A micro-batch whose blocks run in slices.

    Args:
        run: the run of the step that noted the calls of this stage's blocks.
        bounds: where each slice begins and ends.
        streams: the random numbers.

    Raises:
        PhantomError: the step computes between blocks, or a mask looks ahead.
    """

    def __init__(self, run: PlanRun, bounds: Sequence[tuple[int, int]], streams: RandomStreams) -> None:
        self.run, self.bounds, self.streams, self.length = run, bounds, streams, bounds[-1][1]
        self._given = _StepValues()
        self._before: list[list[KeysAndValues]] = [[] for _ in run.calls]  # by call, then by slice
        self._edges: list[list[tuple[Tensor, GradientEdge]]] = []  # by slice: kept keys or values, and where they enter
        self._repeats: list[dict[int, BlockOnSlice | None]] = []  # by slice: what checkpoints in blocks repeat
        self._outputs: list[dict[Any, GradientEdge]] = []
        self._results: list[Any] = []  # of the last block, by slice
        self._joined: dict[int, Tensor] = {}
        for call in run.calls:
            call.refuse_written()
            self._refuse_ahead(call)

    def _refuse_ahead(self, call: BlockCall) -> None:
        for x in tree_flatten((call.args, call.kwargs))[0]:
            if isinstance(x, Tensor) and not isinstance(x, Phantom) and self._given.is_new(x):
                self._given.leaf(x)
                refuse_ahead(call.hook.name, x, self.length, call.forbids)

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, number: int, received: Mapping[Place, Tensor], send: Sequence[Place]) -> list[Tensor]:
        """Run the blocks on slice `number`; returns what is sent, by position among the next block's arguments."""
        made = self._received(received)
        self._edges.append([])
        self._repeats.append({})
        for call, before in zip(self.run.calls, self._before, strict=True):
            self._call(call, before, number, made)
        outputs = [self._output(position, made) for position in send]
        edges = {place: get_gradient_edge(x) for place, x in zip(send, outputs, strict=True) if x.requires_grad}
        self._outputs.append(edges)
        if number == len(self.bounds) - 1:
            self._before.clear()
        return outputs

    def _received(self, received: Mapping[Place, Tensor]) -> Made:
        """What came in, by what it stands for."""
        if not received:
            return {}
        first = self.run.calls[0]
        leaves = tree_flatten((first.args, first.kwargs))[0]
        return {_name(leaves[place]): x for place, x in received.items() if isinstance(place, int)}

    def _call(self, call: BlockCall, before: list[KeysAndValues], number: int, made: Made) -> None:
        start, end = self.bounds[number]

        def real(x: Tensor) -> Tensor:
            return (
                self._value(x, made, call)
                if isinstance(x, Phantom)
                else cut(self._given.leaf(x), start, end, self.length)
            )

        args, kwargs = real_arguments((call.args, call.kwargs), real)
        stream = stream_of(call.hook, self.run.key, number)
        on_slice = BlockOnSlice(call, self.run.cut, tuple(before), end, self.length, stream)
        result, attention = on_slice.run(args, kwargs)
        if attention.is_repeated:
            self._repeats[-1][stream] = on_slice if len(attention.own) == 1 else None
        self.streams.start(self.run.key ^ call.hook.stream_behind)
        tensors = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        made.update({(call.hook.name, place): x for place, x in enumerate(tensors)})
        if number < len(self.bounds) - 1:
            before.append([SliceKeys(self._kept(of.key), self._kept(of.value), of.padding) for of in attention.own])
        if self.run.ends_step and call is self.run.calls[-1]:
            self._results.append(result)

    def _kept(self, x: Tensor) -> Tensor:
        """Keys or values for later slices."""
        kept = x.detach().requires_grad_(x.requires_grad)
        if x.requires_grad:
            self._edges[-1].append((kept, get_gradient_edge(x)))
        return kept

    def _value(self, phantom: Phantom, made: Made, call: BlockCall) -> Tensor:
        value = made.get(_name(phantom))
        if value is None:
            raise PhantomError(between(f"`{call.hook.name}`", phantom.origin))
        return value

    def _output(self, position: Place, made: Made) -> Tensor:
        leaf = self.run.handed_on[position] if isinstance(position, int) else None
        value = made.get(_name(leaf))
        if value is None:
            what = leaf.origin if isinstance(leaf, Phantom) else "what the step made itself"
            raise PhantomError(between(f"the first block of stage {self.run.stage + 1}", what))
        return value

    def joined(self) -> Any:
        """What the last block returned, slices put together; where it carries a gradient, leaves."""
        flat, structure = zip(*map(tree_flatten, self._results), strict=True)
        whole = list(flat[-1])
        for place, parts in enumerate(zip(*flat, strict=True)):
            if isinstance(parts[0], Tensor):
                carries = any(part.requires_grad for part in parts)
                whole[place] = torch.cat([part.detach() for part in parts], 1).requires_grad_(carries)
                self._joined[place] = whole[place]
        for edges, leaves in zip(self._outputs, flat, strict=True):
            edges.update({n: get_gradient_edge(leaves[n]) for n in self._joined if leaves[n].requires_grad})
        self._results.clear()
        return tree_unflatten(whole, structure[-1])

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, number: int, gradients: Mapping[Any, Tensor]) -> None:
        """Run the backward of slice `number`, the highest one left, from the gradients of what it sent."""
        edges = self._outputs.pop()
        roots: list[Any] = [edges[place] for place in gradients]
        seeds = list(gradients.values())
        for kept, edge in self._edges.pop():
            if kept.grad is not None:
                roots.append(edge)
                seeds.append(kept.grad)
                kept.grad = None
        repeats = self._repeats.pop()
        if roots:
            self.streams.start(self.run.key)
            try:
                with RepeatedSlices(repeats, self.streams) if repeats else nullcontext():
                    torch.autograd.backward(roots, seeds)
            except CheckpointError as error:
                raise PhantomError(
                    "A block that is computed again in the backward (torch.utils.checkpoint) computes something else."
                    ' Switch activation checkpointing off and use PipelineStrategy(recompute="block"), or a schedule of'
                    " whole micro-batches."
                ) from error
        if number == 0:
            self._given.backward()

    def of_joined(self, number: int) -> dict[Any, Tensor]:
        """On the last stage: the gradients of what slice `number` put into what was joined."""
        start, end = self.bounds[number]
        grads = {place: x.grad for place, x in self._joined.items() if x.grad is not None}
        edges = self._outputs[number]
        return {place: grad.narrow(1, start, end - start) for place, grad in grads.items() if place in edges}


class _StepValues:
    """What the step gave to blocks and no block made: a leaf for each tensor, of which slices are views."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}

    def is_new(self, x: Tensor) -> bool:
        return id(x) not in self._leaves

    def leaf(self, x: Tensor) -> Tensor:
        if id(x) not in self._leaves:
            self._leaves[id(x)] = (x, x.detach().requires_grad_(x.requires_grad))
        return self._leaves[id(x)][1]

    def backward(self) -> None:
        """All slices are done: gradients go on into what the step computed before the blocks."""
        pairs = [(x, leaf.grad) for x, leaf in self._leaves.values() if leaf.grad is not None]
        self._leaves.clear()
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])


def _name(leaf: Any) -> Any:
    """By what a Phantom is known: the unit's result that it is, or itself."""
    return (leaf.leaf or id(leaf)) if isinstance(leaf, Phantom) else None


def between(block: str, origin: str) -> str:
    """The message for what is computed between blocks."""
    return (
        f"The step calls {block} with something computed from {origin} between blocks, and a schedule of token slices"
        " runs nothing but blocks on slices. Compute it in a block, or use a schedule of whole micro-batches."
    )
