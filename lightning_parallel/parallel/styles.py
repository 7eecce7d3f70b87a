"""What a module becomes when it is cut: its class is swapped for a subclass with one operator before or behind.

The one idea: the module stays what it is (its names, hooks and type), and only its own `forward` changes. No hooks are
used: those would be run, with stand-ins, by pipeline stages that do not hold the module.

    style      module     weights cut        input                 output
    colwise    Linear     along the output   copied to the ranks   this rank's features
    keys       Linear     along the output   copied to the ranks   the head of keys that this rank's queries attend to
    fused      Linear     each of three matrices, along the output: colwise the first, keys the others
    rowwise    Linear     along the input    this rank's features  summed over the ranks
    vocab      Embedding  rows               as it is              summed over the ranks
    vocab      Linear     along the output   copied to the ranks   gathered: all features
    features   Embedding  along the features as it is              this rank's features
    sinks      attention  numbers of heads   as they are           as they are
    experts    any        inner features     copied to the ranks   summed over the ranks
    summed     any        not                this rank's features  gradients of its parameters are summed
    joint      norm       not                this rank's heads     this rank's heads, normalised with all others;
                                                                   gradients of its parameters are summed
    sequence   norm       not                slices                gathered, or slices behind a row-wise module;
                                                                   gradients of its parameters are summed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.parallel.logits import VocabLogits
from lightning_parallel.parallel.operators import gather_rows, scatter_sums, sum_over_ranks
from lightning_parallel.parallel.overlap import overlaps
from lightning_parallel.parallel.region import Region

SEQUENCE_DIM = 1  # of hidden states [rows, positions, features]


@dataclass(eq=False)
class CutPart:
    """What a cut module knows.

    Attributes:
        name: the module's.
        region: of the model.
        number: of the module among those cut, for its random numbers.
        features: of the whole output; of a head of keys.
        begin: of this rank's rows of an embedding, or of its output features.
        copies: ranks that have each head of keys.
        apart: whether a head's output is left apart; see `VocabLogits`.
        sliced: whether it lies in a block whose hidden states are slices of the sequence.
    """

    name: str
    region: Region
    number: int
    features: int = 0
    begin: int = 0
    copies: int = 1
    apart: bool = False
    sliced: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CutPart:
        return self


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2 in `transformers`, whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def features_of(module: Any) -> tuple[int, int]:
    """Input and output features of a whole linear module."""
    rows, columns = module.weight.shape
    return (rows, columns) if is_conv1d(module) else (columns, rows)


def product(module: Any, x: Tensor) -> Tensor:
    """A linear module without its bias."""
    if is_conv1d(module):
        return torch.mm(x.flatten(0, -2), module.weight).view(*x.shape[:-1], -1)
    return F.linear(x, module.weight)


class Colwise:
    """A linear module with this rank's output features."""

    _tensor_part: CutPart

    def forward(self, x: Tensor) -> Tensor:
        part = self._tensor_part
        _refuse_width(self, x, "colwise")
        part.region.draw_own(part.number, self.training)  # type: ignore[attr-defined]
        if part.sliced:  # a norm has gathered it, and sums its gradients
            return super().forward(x)  # type: ignore[misc]
        if part.region.overlap and overlaps(self):
            return part.region.product(self, x)
        return super().forward(part.region.copied(x))  # type: ignore[misc]


class GatheredKeys(Colwise):
    """A linear module that makes fewer heads than ranks: their features are gathered, and each rank takes a head."""

    def forward(self, x: Tensor) -> Tensor:
        part = self._tensor_part
        whole = gather_rows(super().forward(x), part.region.axis, x.dim() - 1)
        return whole.narrow(-1, part.begin, part.features)


class Fused(Colwise):
    """A linear module that makes query, key and value, of keys fewer heads than ranks: see `GatheredKeys`."""

    def forward(self, x: Tensor) -> Tensor:
        part = self._tensor_part
        y = super().forward(x)
        few = 2 * part.features // part.copies  # features of keys and values together
        pairs = gather_rows(y[..., -few:].unflatten(-1, (2, -1)), part.region.axis, x.dim())
        return torch.cat([y[..., :-few], pairs.narrow(-1, part.begin, part.features).flatten(-2)], -1)


class Rowwise:
    """A linear module with this rank's input features; the bias is added once, to the sum."""

    _tensor_part: CutPart
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        part = self._tensor_part
        _refuse_width(self, x, "rowwise")
        part.region.leave()
        y = product(self, x)
        if part.sliced:
            y = scatter_sums(y, part.region.axis, SEQUENCE_DIM)
        else:
            y = sum_over_ranks(y, part.region.axis)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        part.region.summed = ref(y)
        return y


class Head(Colwise):
    """A linear module with this rank's output features, which are gathered behind it."""

    def forward(self, x: Tensor) -> Tensor:
        part = self._tensor_part
        _refuse_width(self, x, "vocab")
        y = super(Colwise, self).forward(part.region.copied(x))  # type: ignore[misc]
        logits = VocabLogits(y, part.features, part.begin, part.region.axis)
        return logits if part.apart else logits.whole()


class VocabEmbedding:
    """An embedding with this rank's rows of the table."""

    _tensor_part: CutPart
    weight: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        part = self._tensor_part
        local = ids - part.begin
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        y = super().forward(local.masked_fill(elsewhere, 0))  # type: ignore[misc]
        return sum_over_ranks(y.masked_fill(elsewhere.unsqueeze(-1), 0.0), part.region.axis)


class JointNorm:
    """A norm of this rank's heads together with those of all others: whatever it computes, of all features."""

    _tensor_part: CutPart

    def forward(self, x: Tensor) -> Tensor:
        part, features = self._tensor_part, x.shape[-1]
        axis = part.region.axis
        whole = gather_rows(x, axis, x.dim() - 1)
        if part.copies > 1:  # a head that several ranks have counts once
            whole = whole.unflatten(-1, (axis.size, features))[..., :: part.copies, :].flatten(-2)
        y = super().forward(whole)  # type: ignore[misc]
        return y.narrow(-1, axis.rank // part.copies * features, features)


class SequenceNorm:
    """A norm on a slice of the sequence, whose output every rank needs whole, unless it comes right behind a row-wise
    product: then what follows is the sum with the residual, in slices."""

    _tensor_part: CutPart

    def forward(self, x: Tensor) -> Tensor:
        part = self._tensor_part
        if part.region.summed() is x:
            return super().forward(x)  # type: ignore[misc]
        part.region.leave()
        return gather_rows(super().forward(x), part.region.axis, SEQUENCE_DIM)  # type: ignore[misc]


class Scope:
    """A module that holds column-wise ones: what they share is forgotten when it returns."""

    _tensor_scope: CutPart

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = _scope_of(self)
        if part is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        part.region.open()
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            _explain(error, part)
            raise
        finally:
            part.region.close()


class Checked:
    """A module that holds column-wise ones and the row-wise one behind them: its first call is checked."""

    _tensor_check: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check = self.__dict__.pop("_tensor_check", None)
        if check is not None:
            check(self, super().__call__, args, kwargs)  # type: ignore[misc]
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def _scope_of(module: Any) -> CutPart | None:
    """What a scope knows. A slice of an `nn.Sequential`, a new one of its class, finds it in a module inside."""
    known: CutPart | None = module.__dict__.get("_tensor_scope")
    if known is not None:
        return known
    return next((inner._tensor_part for inner in module.modules() if "_tensor_part" in inner.__dict__), None)


def _refuse_width(module: Any, x: Tensor, kind: str) -> None:
    """Raise where a cut module does not get what it takes: cuts before and behind have to fit each other.

    Raises:
        ValueError: it gets other features, naming the cut that would fit.
    """
    wanted = features_of(module)[0]
    if not x.dim() or x.shape[-1] == wanted:
        return
    part = module._tensor_part
    name, size = part.name, part.region.axis.size
    said = f'`{name}` is cut "{kind}" in tensor_plan and takes {wanted} features, but gets {x.shape[-1]}.'
    if kind == "rowwise":
        raise ValueError(
            f'{said} It takes a part, 1/{size}, of what a module that is cut "colwise" makes. Cut what comes before'
            f' it "colwise", or cut `{name}` "colwise", or leave it out of tensor_plan.'
        )
    raise ValueError(
        f'{said} It takes all of them, and what comes before it is cut "colwise" and makes 1/{size}. Cut `{name}`'
        ' "rowwise", or leave what comes before it out of tensor_plan.'
    )


def _explain(error: RuntimeError, part: CutPart) -> None:
    """Most such modules fail because they take sizes from where tensor parallelism cannot change them."""
    if "shape" in str(error) or "size" in str(error):
        error.add_note(
            f"`{part.name}` runs on 1/{part.region.axis.size} of its heads and features (tensor parallelism). Its code"
            " should take their number from an attribute (num_heads, ...) or leave it open (-1), and not from the shape"
            ' of its input. Where modules are cut by name, what takes the features of one that is cut "colwise" has to'
            ' be cut "rowwise". Or leave it out of tensor_plan.'
        )


STYLES: dict[str, type] = {
    "colwise": Colwise, "keys": GatheredKeys, "fused": Fused, "rowwise": Rowwise, "vocab": VocabEmbedding, "head": Head,
    "sequence": SequenceNorm, "joint": JointNorm,
}  # fmt: skip
