"""Sequence parallelism: between the products every rank holds a slice of the positions.

The one idea: what a tensor axis would compute alike on every rank (norms, dropout, residual sums) it computes on
slices. The first block slices its input and the last one joins its output; in between a norm's output is gathered,
since attention and perceptron need all positions, and a row-wise product's sum is scattered. An all-reduce is a
reduce-scatter and an all-gather, so no more is sent than without.

A norm between a row-wise product and the residual sum (Gemma 2) works on slices and gathers nothing. A router and its
experts work on all positions, as without slices, and each rank goes on with its slice of what they give: a router's
own loss looks at all positions too.

Left out: norms behind the residual sum (BERT), whose output is needed in slices and whole; encoder-decoders. Slices
begin at the first block, not in the embedding: what the user's code adds there has all positions.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel.parallel.auto import Style
from lightning_parallel.parallel.check import Check
from lightning_parallel.parallel.classes import become
from lightning_parallel.parallel.operators import count_once, join_slices, slice_rows
from lightning_parallel.parallel.region import Region
from lightning_parallel.parallel.styles import SEQUENCE_DIM, CutPart


class SequenceBlock:
    """A block that works on slices; `_tensor_block` says what it knows of the chain."""

    _tensor_block: ChainEnds

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ends = self._tensor_block
        if ends.check is not None:
            ends.run_check(self, super().__call__, args, kwargs)  # type: ignore[misc]
        if ends.first:
            args, kwargs = ends.sliced(args, kwargs)
        result = ends.run(super().__call__, args, kwargs, self.training)  # type: ignore[misc, attr-defined]
        return ends.joined(result) if ends.last else result


class WholePositions:
    """A module in a block on slices whose ranks all compute the same of all positions, which a norm has gathered, with
    the same random numbers."""

    _tensor_whole: CutPart

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region = self._tensor_whole.region
        region.leave()

        def own(y: Tensor) -> Tensor:
            y = slice_rows(y, region.axis, SEQUENCE_DIM)
            region.summed = ref(y)
            return y

        args, kwargs = _with_first((args, kwargs), lambda x: count_once(x, region.axis))
        return _with_first(super().__call__(*args, **kwargs), own)  # type: ignore[misc]


class ChainEnds:
    """What a block knows of the chain.

    Args:
        part: of the block.
        first, last: whether it is the first or the last.
        check: of its first call, or None.
    """

    def __init__(self, part: CutPart, first: bool, last: bool, check: Check | None = None) -> None:
        self.part, self.first, self.last, self.check = part, first, last, check

    def __deepcopy__(self, memo: dict[int, Any]) -> ChainEnds:
        return self

    def run(self, call: Any, args: Any, kwargs: Any, training: bool) -> Any:
        """Call the block on slices, with random numbers of this rank's own."""
        region = self.part.region
        region.open()
        try:
            region.draw_own(self.part.number, training)
            return call(*args, **kwargs)
        finally:
            region.close()

    def sliced(self, args: Any, kwargs: Any) -> Any:
        """A block's arguments with this rank's slice of the first tensor among them."""
        return _with_first((args, kwargs), self._slice)

    def joined(self, tree: Any) -> Any:
        """A structure with all positions of its first tensor, of which it has a slice."""
        return _with_first(tree, lambda x: join_slices(x, self.part.region.axis, SEQUENCE_DIM))

    def run_check(self, module: Any, call: Any, args: Any, kwargs: Any) -> None:
        """Compare the first call, on slices, with that of the whole block on all positions.

        Raises:
            ValueError: they differ.
        """
        check, self.check = self.check, None
        assert check is not None
        if not self.first:
            args, kwargs = self.joined((args, kwargs))

        def on_slices(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.sliced(args, kwargs)
            return self.joined(self.run(call, args, kwargs, training=False))

        try:
            check(module, on_slices, args, kwargs)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"sequence_parallel=True: `{self.part.name}` ({type(module).__name__}) does not compute on slices of"
                " the sequence what it computes on all of it. It needs a norm in front of attention and perceptron, and"
                " nothing else that reads other positions. Use sequence_parallel=False."
            ) from error

    def _slice(self, x: Tensor) -> Tensor:
        size = self.part.region.axis.size
        if x.dim() != 3 or x.shape[SEQUENCE_DIM] % size:
            raise ValueError(
                f"sequence_parallel=True slices the positions of the input of `{self.part.name}`, which has the shape"
                f" {tuple(x.shape)} and not [rows, positions, features] with positions that {size} ranks divide."
                " Pad the sequences, or use sequence_parallel=False."
            )
        return slice_rows(x, self.part.region.axis, SEQUENCE_DIM)


def add_sequence_styles(model: nn.Module, styles: Mapping[str, Style]) -> tuple[dict[str, Style], list[str], list[str]]:
    """The styles with those of norms in the blocks, the blocks' names, in order, and what `routed` finds.

    Raises:
        ValueError: there is no single chain of blocks, or a block has parameters of another kind.
    """
    blocks, wholes = _chain(model, styles), routed(styles)
    added: dict[str, Style] = {}
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if name in styles or next(module.parameters(recurse=False), None) is None:
                continue
            if lies_in(name, [whole for whole in wholes if whole != block]):
                continue
            if "norm" not in type(module).__name__.lower():
                raise ValueError(
                    f"sequence_parallel=True: `{name}` ({type(module).__name__}) has parameters, is cut by no style and"
                    " is no norm, so that it is not known which positions it needs. Name it in tensor_plan, or use"
                    " sequence_parallel=False."
                )
            added[name] = Style("sequence")
    return {**styles, **added}, blocks, wholes


def routed(styles: Mapping[str, Style]) -> list[str]:
    """The modules that hold experts, and so a router, which works on all positions."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style.kind == "experts"))


def refuse_outside(styles: Mapping[str, Style], blocks: Sequence[str] = ()) -> None:
    """Raise for "sequence" in a plan where nothing is sliced.

    Raises:
        ValueError: see above.
    """
    for name, style in styles.items():
        if style.kind == "sequence" and not any(name.startswith(f"{block}.") for block in blocks):
            raise ValueError(
                f'tensor_plan makes `{name}` "sequence", but its input is no slice of the sequence: that is so in the'
                " blocks, with sequence_parallel=True. Leave it out of tensor_plan; norms in blocks are found."
            )


def lies_in(name: str, modules: Iterable[str], but: Iterable[str] = ()) -> bool:
    """Whether a module lies in one of some, and in none of others."""
    return any(name.startswith(f"{x}.") for x in modules) and not any(name.startswith(f"{x}.") for x in but)


def slice_sequences(
    model: nn.Module,
    region: Region,
    blocks: Sequence[str],
    wholes: Sequence[str],
    checks: Mapping[str, Check],
    first: int,
) -> None:
    """Let blocks work on slices.

    Args:
        model, region: of them.
        blocks: names of all, in order.
        wholes: what `routed` found.
        checks: of blocks' first calls, by name.
        first: the first one's number, for its random numbers.
    """
    for number, name in enumerate(blocks):
        ends = ChainEnds(
            CutPart(name, region, first + number), number == 0, number == len(blocks) - 1, checks.get(name)
        )
        become(model.get_submodule(name), SequenceBlock, ends)
    for name in wholes:
        become(model.get_submodule(name), WholePositions, CutPart(name, region, 0))


def _chain(model: nn.Module, styles: Mapping[str, Style]) -> list[str]:
    """The children of the one list of modules in which everything is that is cut by rows."""
    rows = [name for name, style in styles.items() if style.kind == "rowwise"]
    chains = {
        name: [f"{name}.{child}" for child, _ in module.named_children()]
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and rows and all(r.startswith(f"{name}.") for r in rows)
    }
    if not chains:
        raise ValueError(
            f"sequence_parallel=True needs one list of blocks with everything that tensor_plan cuts, and"
            f" {type(model).__name__} has none. Use sequence_parallel=False."
        )
    return max(chains.items(), key=lambda chain: chain[0].count("."))[1]


def _with_first(tree: Any, change: Any) -> Any:
    """A structure with its first tensor of floats changed."""
    leaves, form = tree_flatten(tree)
    place = next(i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point())
    leaves[place] = change(leaves[place])
    return tree_unflatten(leaves, form)
