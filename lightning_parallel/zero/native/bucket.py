"""A bucket: neighbouring parameters in one flat vector, of which every rank owns an equal part.

The one idea: the module's parameters stay what they are, but their memory is the bucket's. Gradients are copied into a
vector of the same layout and reduced, so that each rank is left with its part; the optimizer updates the rank's part of
the parameters (or a 32-bit copy of it), and the parts are gathered into the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.zero.collectives import Traffic, all_gather_parts, average, reduce_scatter_mean
from lightning_parallel.zero.native.layout import lay_out
from lightning_parallel.zero.ranks import Ranks
from lightning_parallel.zero.sharded_gradient import ShardedGradient


class Bucket:
    """Parameters of one dtype in one flat vector.

    Args:
        parameters: in the order in which they lie in the bucket. Their memory moves into it.
        ranks: who shares it.
        master: whether the optimizer updates a 32-bit copy of this rank's part.
        keeps_gradients: whether gradients have a vector that stays, whole on every rank (stage 1), or one for as long
            as they are on their way (stage 2).
        offload: where this rank's part is updated: None is the parameters' device.

    Attributes:
        segments: for each parameter what the optimizer updates in its place, 1-D, or of the parameter's shape where one
            rank owns all; None where this rank owns nothing.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        ranks: Ranks,
        master: bool = False,
        keeps_gradients: bool = False,
        offload: torch.device | None = None,
    ) -> None:
        first = parameters[0]
        self.parameters, self.ranks, self.keeps_gradients = list(parameters), ranks, keeps_gradients
        self.layout = lay_out([p.numel() for p in parameters], ranks.size, first.element_size())
        self.flat = first.detach().new_zeros(self.layout.numel)
        self._shapes = {parameter: parameter.shape for parameter in parameters}
        self._adopt()
        self.own = self._own_part()
        self.places = [self._place(i) for i in range(len(parameters))]
        dtype = torch.promote_types(first.dtype, torch.float32) if master else first.dtype
        as_it_is = (dtype == first.dtype and offload is None) or not any(k for _, k in self.places)
        self.updated = self.own if as_it_is else self.own.to(offload, dtype, copy=True)
        self.segments = [self._segment(i) for i in range(len(parameters))]
        self.gradients: Tensor | None = None  # stage 1: whole, in this layout
        self._views: list[Tensor] = []
        self._before: dict[int, ShardedGradient] = {}
        self._sent: Tensor | None = None
        self._reduced: Tensor | None = None
        self._work: Any = None
        self._present: list[bool] = []

    def _segment(self, index: int) -> nn.Parameter | None:
        at, k = self.places[index]
        if self.ranks.size == 1:
            return nn.Parameter(self.updated[at : at + k].view(self.parameters[index].shape))
        return nn.Parameter(self.updated[at : at + k]) if k else None

    @property
    def has_copy(self) -> bool:
        """Whether the optimizer updates a copy of this rank's part and not the part itself."""
        return self.updated is not self.own

    def _own_part(self) -> Tensor:
        """Where this rank's part of the parameters lies."""
        return self._part_of(self.flat)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @property
    def expected(self) -> int:
        """How many parameters a backward may bring a gradient for."""
        return sum(p.requires_grad for p in self.parameters)

    def made(self) -> list[bool]:
        """For each parameter, whether backwards made a gradient since it was last reduced."""
        gradients = [p.grad.fresh if isinstance(p.grad, ShardedGradient) else p.grad for p in self.parameters]
        return [gradient is not None for gradient in gradients]

    def set_aside(self) -> list[Tensor | None]:
        """What was added to gradients since they were sent, by parameter; `deliver` comes next."""
        late: list[Tensor | None] = []
        for i, parameter in enumerate(self.parameters):
            gradient: Any = parameter.grad
            parameter.grad, is_part = None, isinstance(gradient, ShardedGradient)
            late.append(gradient.fresh if is_part else gradient)
            if is_part:
                self._before[i], gradient.fresh = gradient, None
        return late

    def hold(self) -> None:
        """Keep whole gradients, to which later backwards add (stage 1)."""
        self._collect()
        for parameter, view, made in zip(self.parameters, self._views, self._present, strict=True):
            if made:
                parameter.grad = view
        for i, before in self._before.items():
            if not self._present[i]:
                self.parameters[i].grad = before
            elif before.local.numel():  # reduced already, and more is coming: this rank's part counts N times
                self._views[i].view(-1)[slice(*self.layout.piece(i, self.ranks.rank))].add_(
                    before.local, alpha=self.ranks.size * self.ranks.num_replicas
                )
        self._before = {}

    def reduce(self, traffic: Traffic) -> list[bool]:
        """Begin to average gradients over the ranks; returns which parameters have one here."""
        whole = self._collect()
        for parameter in self.parameters:
            parameter.grad = None
        part = self._part_of(whole)
        self._reduced = part if self.keeps_gradients else torch.empty_like(part)
        self._sent = None if self.keeps_gradients else whole
        self._work = reduce_scatter_mean(self._reduced, whole, self.ranks.reductions, traffic)
        return self._present

    def wait(self) -> None:
        """The reduced part may be used from now on; what was sent is freed."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None

    def deliver(self, made: Sequence[bool], traffic: Traffic) -> None:
        """Put the reduced gradients where users and optimizers look for them.

        Args:
            made: for each parameter, whether any rank had a gradient for it.
            traffic: counts.
        """
        self.wait()
        reduced, self._reduced = self._reduced, None
        if reduced is None:
            return
        if self.ranks.num_replicas > 1:
            average(reduced, self.ranks.replicas, traffic)
        earlier = self._earlier()
        if earlier is not None:
            earlier.add_(reduced)
        for i, parameter in enumerate(self.parameters):
            before, (at, k) = self._before.get(i), self.places[i]
            if made[i] and before is None:
                begin = self.layout.piece(i, self.ranks.rank)[0]
                before = ShardedGradient(reduced[at : at + k], parameter, self.ranks.group, begin)
            elif made[i] and before is not None and earlier is None:
                before.local.add_(reduced[at : at + k])
            parameter.grad = before
        self._before = {}

    def _earlier(self) -> Tensor | None:
        """The one vector in which the gradients lie that were reduced before, each in its place, if they do."""
        earlier: Tensor | None = None
        for i, gradient in self._before.items():
            at, k = self.places[i]
            base = gradient.local._base
            earlier = base if earlier is None else earlier
            if k and (base is None or base is not earlier or gradient.local.storage_offset() != at):
                return None
        return earlier if earlier is not None and earlier.numel() == self.layout.part else None

    def _collect(self) -> Tensor:
        """All gradients in one vector of the bucket's layout; those that are missing count as zero."""
        whole = self._room()
        self._present, copied, into, absent = [], [], [], []
        for i, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            gradient = self._fresh(i, parameter)
            self._present.append(gradient is not None)
            if gradient is None:
                absent.append(view)
            elif gradient is not view:
                into.append(view)
                copied.append(gradient)
        if copied:
            torch._foreach_copy_(into, copied)
        if absent:
            torch._foreach_zero_(absent)
        if not self.keeps_gradients:
            self._views = []
        return whole

    def _fresh(self, i: int, parameter: nn.Parameter) -> Tensor | None:
        """What backwards made of a parameter's gradient since it was last reduced."""
        gradient = parameter.grad
        if not isinstance(gradient, ShardedGradient):
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(f"A gradient of shape {tuple(gradient.shape)} is sparse. Use sparse=False.")
            return gradient
        if self.keeps_gradients and gradient.local.numel():
            gradient.local = gradient.local.clone()  # the vector it lies in is about to be used again
        self._before[i] = gradient
        fresh, gradient.fresh = gradient.fresh, None
        return fresh

    def _room(self) -> Tensor:
        """The vector for gradients, and views of it for each parameter."""
        whole = self.gradients if self.gradients is not None else torch.empty_like(self.flat)
        if not self._views:
            self._views = self._split(whole)
        if self.keeps_gradients:
            self.gradients = whole
        return whole

    # -- parameters ----------------------------------------------------------------------------------------------------

    def gather(self, traffic: Traffic) -> Any:
        """Begin to bring the updated parts of all ranks into the parameters; returns what to wait for."""
        if self.has_copy:
            self.own.copy_(self.updated)
        return all_gather_parts(self.flat, self.own, self.ranks.group, traffic)

    def take_over(self) -> None:
        """Hooks may have written to parameters, or given them other memory, since they were last gathered: the
        optimizer goes on from what they wrote.

        Raises:
            ValueError: a parameter has another shape or dtype than before.
        """
        self._rebind_all()
        self._take_over_part()

    def _rebind_all(self) -> None:
        for parameter, at in zip(self.parameters, self.layout.offsets, strict=True):
            if parameter.data_ptr() != self.flat.data_ptr() + at * self.flat.element_size() and parameter.numel():
                self._rebind(parameter, at)

    def _take_over_part(self) -> None:
        """The copy of 32 bits goes on from this rank's part where that is not what was made of the copy."""
        if self.has_copy:
            seen = self.own.to(self.updated.device)
            is_same = seen == self.updated.to(seen.dtype)
            self.updated.copy_(torch.where(is_same, self.updated, seen.to(self.updated.dtype)))

    def _rebind(self, parameter: nn.Parameter, at: int) -> None:
        """Somebody has given a parameter other memory, as by `w.data = ...`."""
        place = self.flat[at : at + parameter.numel()]
        if parameter.shape != self._shapes[parameter] or parameter.dtype != self.flat.dtype:
            raise ValueError(
                f"A parameter of shape {tuple(self._shapes[parameter])} and {self.flat.dtype} was made one of"
                f" {tuple(parameter.shape)} and {parameter.dtype} in training, while ZeRO divides its states. Keep"
                " shape and dtype (parameter.data.copy_(...)), or change it before fit."
            )
        view = place.view(parameter.shape)
        with torch.no_grad():
            view.copy_(parameter.detach())
        parameter.data = view

    def refresh(self) -> None:
        """The parameters were written to: take over their values where the optimizer has a copy."""
        if self.has_copy:
            self.updated.copy_(self.own)

    def release(self, failed: bool = False) -> None:
        """Give every parameter memory of its own again, on the host; after a failure where it lies."""
        for parameter in self.parameters:
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None
        self._before, self._work, self._sent, self._reduced = {}, None, None, None
        if failed and self.flat.device.type != "cpu":  # it may never answer
            return
        for parameter in self.parameters:
            parameter.data = parameter.data.to("cpu", copy=True)
        for segment in (s for s in self.segments if s is not None):
            segment.data = segment.data.cpu()
        if self.flat.device.type != "cpu":
            self.flat = self.own = self.updated = self.flat.new_empty(0)
        self.gradients, self._views = None, []

    def _adopt(self) -> None:
        for parameter, view in zip(self.parameters, self._split(self.flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = None

    def _split(self, flat: Tensor) -> list[Tensor]:
        places = zip(self.parameters, self.layout.offsets, strict=True)
        return [flat[at : at + p.numel()].view(p.shape) for p, at in places]

    def _part_of(self, flat: Tensor) -> Tensor:
        return flat[self.ranks.rank * self.layout.part : (self.ranks.rank + 1) * self.layout.part]

    def _place(self, index: int) -> tuple[int, int]:
        """Where in this rank's part a parameter's elements begin, and how many there are."""
        begin, end = self.layout.piece(index, self.ranks.rank)
        if end == begin:
            return 0, 0
        return self.layout.offsets[index] + begin - self.ranks.rank * self.layout.part, end - begin
