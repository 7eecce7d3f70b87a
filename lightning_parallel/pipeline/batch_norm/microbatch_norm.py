"""BatchNorm under micro-batches: normalise each by its own statistics, update the running ones once a batch and call.

The one idea (deferred batch normalisation): in a training step the micro-batches' sums are gathered beside the forward,
and at its end the running statistics take one step with the mean and variance of the whole batch, as one process would;
where a micro-batch calls a module several times, one step for each call, in their order.
Source: Kim et al., torchgpipe, arXiv 2004.09910, section 3.3 (deferred batch normalization).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.pipeline.stage.cut import CutModel


class _Sums:
    """Count, sum and sum of squares of what one BatchNorm saw in a step, per channel, in float64."""

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, torch.zeros(()), torch.zeros(())

    def packed(self, like: Tensor) -> Tensor:
        """All three as one vector; `like`: a running statistic, for one that saw nothing."""
        sums = [total.to(like.device, torch.float64).expand(like.shape) for total in (self.total, self.squares)]
        return torch.cat([torch.full((1,), self.count, dtype=torch.float64, device=like.device), *sums])

    def unpack(self, packed: Tensor) -> None:
        """The inverse of `packed`."""
        self.count = int(packed[0])
        self.total, self.squares = packed[1:].chunk(2)

    def add(self, x: Tensor) -> None:
        x = x.detach().double()
        dims = [d for d in range(x.dim()) if d != 1]
        self.count += x.numel() // x.shape[1]
        self.total = self.total.to(x.device) + x.sum(dims)
        self.squares = self.squares.to(x.device) + x.pow(2).sum(dims)

    def update(self, module: Any) -> None:
        """One step of the running statistics, as `F.batch_norm` takes it for the whole batch."""
        module.num_batches_tracked.add_(1)
        momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        mean = self.total / self.count
        variance = (self.squares / self.count - mean.pow(2)).clamp_min(0) * (self.count / max(1, self.count - 1))
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
        module.running_var.lerp_(variance.to(module.running_var.dtype), momentum)


class DeferredBatchNorm:
    """The BatchNorms of a model with their running statistics deferred to the end of a step.

    Args:
        model: the model.
        cut: what knows whether a micro-batch is running once more.
        add_up: sums vectors in place, by the name of the module, over the ranks that hold the module; None where each
            sees all micro-batches.
    """

    def __init__(
        self, model: nn.Module, cut: CutModel, add_up: Callable[[Mapping[str, Tensor]], None] | None = None
    ) -> None:
        self._cut, self._add_up = cut, add_up
        self._names = {module: name for name, module in model.named_modules()}
        self._modules = [
            m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)
        ]

    def says(self, sizes: Sequence[int]) -> str:
        """What has to be known of norms that are about to train on micro-batches of so many rows; "" of none."""
        names = [self._names[module] for module in self._modules if module.training]
        if not names or len(sizes) == 1:
            return ""
        norms = f"`{names[0]}`" if len(names) == 1 else f"`{names[0]}` and {len(names) - 1} more"
        return (
            f"Batch norms ({norms}) normalise within a micro-batch of {min(sizes)} rows, where one process has"
            f" {sum(sizes)}: losses and weights differ from one process's, the more so the fewer rows. For its numbers"
            " use num_microbatches=1; otherwise give micro-batches more rows (fewer micro-batches, larger batches), or"
            " use norms of single rows (GroupNorm, LayerNorm). Running statistics are those of the whole batch."
        )

    @contextmanager
    def step(self, num_microbatches: int) -> Iterator[None]:
        """One training step; with a single micro-batch that runs once the modules are left to themselves."""
        tracking = [
            m for m in self._modules
            if m.training and m.track_running_stats and m.running_mean is not None
            and not isinstance(m.running_mean, Phantom)
        ]  # fmt: skip
        once = num_microbatches == 1 and not self._cut.recomputes and self._add_up is None
        if once or not tracking:
            yield
            return
        sums: dict[Any, list[_Sums]] = {m: [] for m in tracking}
        hooks = [m.register_forward_pre_hook(self._gather(sums[m])) for m in tracking]
        for module in tracking:
            module.track_running_stats = False
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module in tracking:
                module.track_running_stats = True
        if self._add_up is not None:
            self._share(sums, self._add_up)
        with torch.no_grad():
            for module in tracking:
                for of_call in sums[module]:
                    if of_call.count:
                        of_call.update(module)

    def _share(self, sums: Mapping[Any, list[_Sums]], add_up: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Replicas of a stage see a part of the micro-batches each: their sums are those of the batch."""
        called = {self._names[module]: torch.tensor([len(calls), len(calls) > 0]) for module, calls in sums.items()}
        add_up(called)  # who saw no micro-batch does not know how often one calls a module
        for module, calls in sums.items():
            total, ranks = called[self._names[module]].tolist()
            calls += [_Sums() for _ in range(total // max(1, ranks) - len(calls))]
        packed = {
            self._names[module]: torch.cat([of.packed(module.running_mean) for of in calls])
            for module, calls in sums.items() if calls
        }  # fmt: skip
        add_up(packed)
        for module, calls in sums.items():
            for of, whole in zip(calls, packed[self._names[module]].chunk(len(calls)) if calls else (), strict=True):
                of.unpack(whole)

    def _gather(self, sums: list[_Sums]) -> Any:
        """A pre-hook that adds what a module sees, but not what it sees again (in or before a backward)."""
        called: Counter[int] = Counter()  # by micro-batch

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            run = self._cut.active
            if not module.training or (run is not None and run.again) or torch._C._current_autograd_node() is not None:
                return
            number = -1 if run is None else run.microbatch
            if called[number] == len(sums):
                sums.append(_Sums())
            sums[called[number]].add(args[0])
            called[number] += 1

        return hook
