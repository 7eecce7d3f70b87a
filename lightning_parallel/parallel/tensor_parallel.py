"""One rank's part of a model whose modules are cut over a tensor axis.

The one idea: the parameters stay the objects they are, and their data becomes the rank's part; who holds a reference
(an optimizer, a tied module, a flat buffer) needs to know nothing. The whole can be had back at any time: names and
shapes of the user's are those of checkpoints, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate

from lightning_parallel.parallel.attention import Heads
from lightning_parallel.parallel.auto import Style
from lightning_parallel.parallel.axis import TensorAxis
from lightning_parallel.parallel.check import Check
from lightning_parallel.parallel.classes import become, become_itself, own_class
from lightning_parallel.parallel.cuts import find_shares
from lightning_parallel.parallel.experts import GATES_BIAS, Experts
from lightning_parallel.parallel.heads import groups_of, shared_heads
from lightning_parallel.parallel.plan import Plan, owners, resolve
from lightning_parallel.parallel.region import Region
from lightning_parallel.parallel.sequence import add_sequence_styles, lies_in, refuse_outside, slice_sequences
from lightning_parallel.parallel.styles import STYLES, Checked, CutPart, Scope
from lightning_parallel.parallel.uncut import Uncut
from lightning_parallel.parallel.widths import own_widths
from lightning_parallel.pipeline.gradients.buckets import buckets, views
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.zero.closed_parameters import lose

_CLASSES = {**STYLES, "heads": Heads, "experts": Experts}


class TensorParallel(Uncut):
    """A model to be cut over the ranks of a tensor axis.

    Args:
        model: the whole model, real or on meta, equal on all ranks before `cut`.
        axis: the ranks.
        device: where this rank computes.
        plan: "auto", or {pattern of module names: style}; see `plan.resolve`.
        loss_parallel: whether logits stay apart for a vocabulary-parallel cross entropy; see `VocabLogits`.
        overlap: whether column-wise modules make weights' gradients while inputs' are summed; not where backwards are
            split. See `overlap`.
        sequence_parallel: whether what lies between products works on slices of the sequence; see `sequence`.

    Attributes:
        styles: of every module that is cut, by name.
        shares: of every parameter that is cut, by each of its names.
        summed: parameters that are not cut and whose gradients are sums over the axis, see `sum_gradients`.

    Raises:
        ValueError: the plan does not fit the model or the number of ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: TensorAxis,
        device: torch.device,
        plan: Plan = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        overlap: bool = False,
    ) -> None:
        self.model, self.axis, self._loss_parallel = model, axis, loss_parallel
        self.styles = resolve(model, plan, axis.size)
        self.blocks, self._routed = list[str](), list[str]()
        if sequence_parallel:
            self.styles, self.blocks, self._routed = add_sequence_styles(model, self.styles)
        refuse_outside(self.styles, self.blocks)
        self.shares = find_shares(model, self.styles, axis.size)
        self._heads = self._find_heads()
        self._region = Region(axis, device, overlap)
        self.summed: dict[nn.Parameter, None] = {}
        self._changed: list[tuple[nn.Module, dict[str, Any]]] = []
        self._hooks: list[Any] = []

    def cut(self) -> None:
        """Make this rank's part of every parameter its data, where it is not yet, and the modules compute with it."""
        for number, (name, style) in enumerate(self.styles.items()):
            module: Any = self.model.get_submodule(name)
            part = self._part_of(name, style, number)
            if style.kind in ("summed", "sequence", "joint"):
                self._are_summed(module.parameters())
            elif style.kind == "rowwise" and part.sliced and module.bias is not None:
                self._are_summed([module.bias])
            elif style.kind == "experts" and f"{name}.{GATES_BIAS}" in self.shares:
                self._are_summed([module.down_proj_bias])
            self._change(module, **own_widths(name, module, style, self.shares, self.axis))
            if style.kind in _CLASSES:
                become(module, _CLASSES[style.kind], part)
        self._open_scopes()
        if self.blocks:
            checks = self._checks(self.blocks)
            slice_sequences(self.model, self._region, self.blocks, self._routed, checks, len(self.styles))
        else:
            self._check_first_calls()
        self.cut_copy(self.model)

    def cut_copy(self, model: nn.Module) -> None:
        """Leave this rank's parts of a whole model: the one that trains, or a copy that averages weights."""
        for name, parameter in model.named_parameters():
            if name in self.shares and not isinstance(parameter, Phantom):
                parameter.data = self.part(name, parameter.data)
        self._hooks.append(model.register_load_state_dict_pre_hook(self._load_parts))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self

    def whole(self, name: str, value: Tensor) -> Tensor:
        """The whole of what is cut like the parameter of that name, on every rank; all ranks call it.

        A tensor of another shape than this rank's part is given back.
        """
        shares = self.shares.get(name)
        if shares is None or tuple(value.shape) != shares.local_shape(self.axis.rank):
            return value
        lengths = [shares.local_shape(rank)[shares.dim] for rank in range(self.axis.size)]
        missing = [*value.shape]
        missing[shares.dim] = max(lengths) - value.shape[shares.dim]
        padded = torch.cat([value, value.new_zeros(missing)], shares.dim) if missing[shares.dim] else value
        gathered = self.axis.all_gather(padded, shares.dim).chunk(self.axis.size, shares.dim)
        return shares.join([p.narrow(shares.dim, 0, n) for p, n in zip(gathered, lengths, strict=True)])

    def part(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of what is the whole of, or like, the parameter of that name; other tensors as they are."""
        shares = self.shares.get(name)
        if shares is None or tuple(value.shape) != shares.shape:
            return value
        return shares.cut(value, self.axis.rank)

    def placement(self, name: str) -> Placement | None:
        """How a parameter lies over the axis in DTensor's words; None where it has none for it."""
        return self.shares[name].placement() if name in self.shares else Replicate()

    def counts(self, name: str) -> bool:
        """Whether this rank's part of a parameter is one that counts in norms."""
        return name in self.shares or self.axis.rank == 0

    def make_whole(self, failed: bool = False) -> None:
        """Give every parameter its whole data back; all ranks call it. After a failure nobody is asked, and parameters
        that are cut raise when they are read."""
        for name, parameter in self.model.named_parameters():
            if name in self.shares and not isinstance(parameter, Phantom):
                parameter.grad = None
                if failed:
                    lose(parameter, name, torch.Size(self.shares[name].shape))
                else:
                    parameter.data = self.whole(name, parameter.data)

    def release(self) -> None:
        """Give every module its own class and attributes back."""
        for module in self.model.modules():
            become_itself(module)
        for module, attributes in self._changed:
            module.__dict__.update(attributes)
        for hook in self._hooks:
            hook.remove()
        self._changed, self._hooks = [], []

    def _find_heads(self) -> dict[str, dict[str, int]]:
        """The modules that hold column-wise ones, and this rank's counts of heads in them."""
        found: dict[str, dict[str, int]] = {}
        for full, style in self.styles.items():
            if style.kind in ("colwise", "keys", "fused"):
                name = full.rpartition(".")[0]
                module = self.model.get_submodule(name)
                if name not in found:
                    found[name] = shared_heads(module, name, self.axis.size)
                if style.copies > 1:
                    found[name] |= groups_of(module, style.copies)
        return found

    def _part_of(self, name: str, style: Style, number: int) -> CutPart:
        """What a module knows of this rank's part of it."""
        part = CutPart(name, self._region, number, sliced=lies_in(name, self.blocks, self._routed))
        if style.kind == "head":
            [part.features] = self.shares[f"{name}.weight"].segments
            part.begin, part.apart = self.shares[f"{name}.weight"].span(self.axis.rank)[0], self._loss_parallel
        elif style.kind in ("summed", "sequence", "joint"):
            part.copies = style.copies
        elif style.copies > 1:
            part.features = self.shares[f"{name}.weight"].segments[-1] * style.copies // self.axis.size
            part.begin, part.copies = self.axis.rank // style.copies * part.features, style.copies
        elif style.kind == "vocab":
            part.begin, _ = self.shares[f"{name}.weight"].span(self.axis.rank)
        return part

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up over the axis, in place and in one message a dtype, gradients of parameters that a rank uses with
        features or positions of its own; all ranks call it with the same."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in buckets(gradients):
            flat = self.axis.all_reduce(torch.cat([gradient.reshape(-1) for gradient in bucket]))
            for gradient, total in zip(bucket, views(flat, bucket), strict=True):
                gradient.copy_(total)

    def _are_summed(self, parameters: Iterable[nn.Parameter]) -> None:
        self.summed.update(dict.fromkeys(p for p in parameters if not isinstance(p, Phantom)))

    def _load_parts(self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
        """Whoever loads a whole state into the model, or a copy of it, loads this rank's parts."""
        mine = [name for name in self.shares if isinstance(state.get(f"{prefix}{name}"), Tensor)]
        state.update({f"{prefix}{name}": self.part(name, state[f"{prefix}{name}"]) for name in mine})

    def _open_scopes(self) -> None:
        """Modules that hold column-wise ones, with heads and widths of this rank."""
        for layer in self.model.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):  # its fast path does not call its modules
                self._change(layer, activation_relu_or_gelu=0)
        for number, (name, heads) in enumerate(self._heads.items()):
            module = self.model.get_submodule(name)
            self._change(module, **heads)
            if name:
                become(module, Scope, CutPart(name, self._region, number))

    def _check_first_calls(self) -> None:
        """Of each kind of module that holds a whole pair, the first one that this rank has."""
        for name, check in self._checks(owners(self.styles)).items():
            become(self.model.get_submodule(name), Checked, check)

    def _checks(self, names: Iterable[str]) -> dict[str, Check]:
        """For the first module of each kind that this rank holds."""
        changed = {id(module): attributes for module, attributes in self._changed}
        kinds: set[type] = set()
        checks: dict[str, Check] = {}
        for name in filter(None, names):
            module = self.model.get_submodule(name)
            held = dict(module.named_parameters())
            if own_class(module) in kinds or any(isinstance(p, Phantom) for p in held.values()):
                continue
            kinds.add(own_class(module))
            cut = {n: self.shares.get(f"{name}.{n}") for n in held}
            shapes = {n: tuple(p.shape) if (of := cut[n]) is None else of.shape for n, p in held.items()}
            were = {n: (own_class(m), changed.get(id(m), {})) for n, m in module.named_modules()}
            routes = any(lies_in(inner, [name]) for inner in self._routed)
            checks[name] = Check(name, self.axis.size, self.part, shapes, were, routes)
        return checks

    def _change(self, module: nn.Module, **attributes: Any) -> None:
        if attributes:
            self._changed.append((module, {name: getattr(module, name) for name in attributes}))
        module.__dict__.update(attributes)
