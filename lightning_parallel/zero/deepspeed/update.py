"""An optimizer's step inside DeepSpeed's: the user's optimizer, on this rank's fragments of parameters.

The one idea: DeepSpeed calls the optimizer with a flat vector and its gradient. Here it steps on the fragments that the
vector is made of, of parameters that have a gradient on some rank, each with a state of its own. So a parameter that no
rank used is left as it is, and so is its step counter, as in one process. Clipping and unscaling are done here too:
DeepSpeed would pass over a step whose norm is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.collectives import average_together
from lightning_parallel.zero.deepspeed.states import Fragment
from lightning_parallel.zero.norms import joined_norm
from lightning_parallel.zero.ranks import Ranks


class FragmentUpdate:
    """What happens to fragments in one step.

    Args:
        fragments: this rank's, by parameter.
        used: parameters that have a gradient on any rank.
        ranks: among whom states are divided, and who holds the same parts elsewhere.
        clip: the norm to which gradients are scaled down; 0 leaves them.
        unscale: what gradients are multiplied by before, 0-D; None leaves them.
    """

    def __init__(
        self, fragments: Mapping[nn.Parameter, Fragment], used: Collection[nn.Parameter], ranks: Ranks,
        clip: float = 0.0, unscale: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.fragments = [fragment for parameter, fragment in fragments.items() if parameter in used]
        self.ranks, self.clip, self.factor = ranks, clip, unscale

    def measure(self, inner: Any, device: torch.device, message_bytes: int) -> None:
        """Average between groups what DeepSpeed has reduced within each, and find what it is scaled by. Collective.

        Args:
            inner: DeepSpeed's optimizer.
            device: where this rank computes.
            message_bytes: up to how many are averaged at a time.
        """
        if self.ranks.num_replicas > 1:
            average_together(self._reduced(inner), self.ranks.replicas, message_bytes, device)
        if not self.clip:
            return
        norm = joined_norm(self._reduced(inner), [], 2.0, self.ranks.group, device)
        if self.factor is not None:
            norm = norm * self.factor.to(device)
        clip = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        self.factor = clip if self.factor is None else clip * self.factor.to(device)

    def _reduced(self, inner: Any) -> list[Tensor]:
        """This rank's gradients as DeepSpeed holds them before its step, padding of zeros included."""
        offloaded = [gradient for fragment in self.fragments if (gradient := _gradient(fragment)) is not None]
        averaged = [group for group in inner.averaged_gradients.values() if group is not None]
        found = offloaded or [gradient for group in averaged for gradient in group]
        return found or [torch.zeros(1, device=inner.device)]

    def step(self, optimizer: Optimizer, own_step: Callable[..., Any], **kwargs: Any) -> Any:
        """The optimizer's own step, on the fragments of the vectors that its groups hold."""
        flats = [group["params"] for group in optimizer.param_groups]
        stepped = []
        for group, vectors in zip(optimizer.param_groups, flats, strict=True):
            there = [f for f in self.fragments if any(f.flat is vector for vector in vectors)]
            group["params"] = [self._with_gradient(fragment) for fragment in there]
            stepped += group["params"]
        try:
            return own_step(**kwargs)
        finally:
            for group, vectors in zip(optimizer.param_groups, flats, strict=True):
                group["params"] = vectors
            for segment in stepped:
                segment.grad = None

    def _with_gradient(self, fragment: Fragment) -> nn.Parameter:
        gradient = _gradient(fragment)
        assert gradient is not None
        if self.factor is not None:
            gradient.mul_(self.factor.to(gradient.device))
        fragment.segment.grad = gradient
        return fragment.segment


def replace_norms(inner: Any, stage: int, measured: Callable[[], Tensor]) -> None:
    """Let DeepSpeed's optimizer ask `measured` for the norm of gradients, and nobody whether they are finite."""
    if stage < 3:
        inner.scaled_global_norm, inner.check_grad_overflow = lambda norm_type=2: measured(), False
    else:
        inner._get_norm_groups, inner.check_overflow = lambda: [measured()], lambda: None


def _gradient(fragment: Fragment) -> Tensor | None:
    return None if fragment.flat.grad is None else fragment.of(fragment.flat.grad)
