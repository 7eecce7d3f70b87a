"""Optimizers as people write them, for tests: with methods of their own, over all parameters, with any states."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def run(closure: Callable[[], Any] | None) -> Any:
    return None if closure is None else torch.enable_grad()(closure)()


class NormedSGD(torch.optim.Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = run(closure)
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for p in found:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])
        return loss


class Prodigious(torch.optim.Optimizer):
    """Finds its step size from sums over all parameters, as Prodigy and D-Adaptation do; its first steps are tiny."""

    def __init__(self, params: Iterable[nn.Parameter], d0: float = 1e-6) -> None:
        super().__init__(params, {"d": d0, "lr": 1.0, "r": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss, group = run(closure), self.param_groups[0]
        total = 0.0
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["p0"], state["s"] = p.detach().clone(), torch.zeros_like(p)
            group["r"] += group["d"] * float((p.grad * (state["p0"] - p)).sum())
            state["s"].add_(p.grad, alpha=group["d"])
            total += float(state["s"].abs().sum())
            p.sub_(p.grad.sign(), alpha=group["d"])
        group["d"] = max(group["d"], 2 * abs(group["r"]) / max(total, 1e-30))
        return loss


class Lamb(torch.optim.Optimizer):
    """Trust ratios of each parameter: whole parameters may be apart, pieces may not."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = run(closure)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad * (p.norm() / p.grad.norm().clamp(min=1e-12)), alpha=group["lr"])
        return loss


class Early(torch.optim.Optimizer):
    """Makes its state where it is constructed."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = run(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["sum"].addcmul_(p.grad, p.grad)
            p.addcdiv_(p.grad, self.state[p]["sum"].sqrt() + 1e-8, value=-0.1)
        return loss


class Polyak(torch.optim.Optimizer):
    """Its step is as long as the loss is high."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = run(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad, alpha=0.1 if loss is None else 0.1 * float(loss))
        return loss


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer and shares its groups and state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.1})
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class ScheduleFree(torch.optim.Optimizer):
    """AdamW without a schedule (Defazio et al., arXiv 2405.15682): weights are averages after `eval`."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                for p in (p for p in group["params"] if "z" in self.state[p]):
                    p.lerp_(self.state[p]["z"], 1 - 1 / group["betas"][0])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in (p for p in group["params"] if "z" in self.state[p]):
                    p.data.lerp_(self.state[p]["z"], 1 - group["betas"][0])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = run(closure)
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Optimizer was not in train mode when step is called")
            beta1, beta2 = group["betas"]
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["z"], state["exp_avg_sq"] = p.detach().clone(), torch.zeros_like(p)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = p.grad / (state["exp_avg_sq"].sqrt() + 1e-8)
                p.lerp_(state["z"], 1 / group["k"])
                p.add_(update, alpha=group["lr"] * (beta1 * (1 - 1 / group["k"]) - 1))
                state["z"].sub_(update, alpha=group["lr"])
        return loss


class BlockAdam(torch.optim.Optimizer):
    """Keeps the scale of every two elements of a large parameter's moments, as 8-bit optimizers do of every 256."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02, large: int = 4) -> None:
        super().__init__(params, {"lr": lr, "large": large})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = run(closure)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    if p.numel() >= group["large"]:
                        state["absmax"] = p.new_zeros(-(-p.numel() // 2))
                state["exp_avg"].lerp_(p.grad, 0.1)
                if "absmax" in state:
                    state["absmax"].copy_(_largest_of_pairs(state["exp_avg"]))
                p.sub_(state["exp_avg"], alpha=group["lr"])
        return loss


def _largest_of_pairs(values: Tensor) -> Tensor:
    flat = values.flatten().abs()
    return torch.cat([flat, flat.new_zeros(flat.numel() % 2)]).view(-1, 2).amax(1)


class Columns(torch.optim.Optimizer):
    """Keeps the largest gradient of each column beside its moments."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = run(closure)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["absmax"] = p.grad.abs().amax(0)
                p.sub_(p.grad, alpha=group["lr"])
        return loss
